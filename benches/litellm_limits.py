#!/usr/bin/env python3
"""By how much concurrent calls exceed the tokens that one key may use in a minute: the gateway, and LiteLLM's proxy.

    python3 -m venv litellm && litellm/bin/pip install 'litellm[proxy]==1.106.12'    # 750 MB
    cargo build --release && python3 benches/litellm_limits.py --litellm litellm/bin/litellm

The calls and the model server are those of model_apis.py: 200 calls of one key, each of which costs 100 tokens and takes 0.3 s, meet a
limit of 10,000 tokens a minute; all at the same time, and 20 at a time. They state `max_tokens`, or not. The proxy counts in its memory,
without a database or Redis; the gateway has its defaults, a worker for each core.
"""

import argparse
import asyncio
import itertools
import os
import pathlib
import signal
import tempfile
import time

import model_apis
from model_apis import CALLS, CALLS_WORTH, COST, ROOT, Model, count, free_port, get, start

LIMIT = CALLS_WORTH * COST
PATH = "/v1/chat/completions"
UNSTATED = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
REQUESTS = {"max_tokens": {**UNSTATED, "max_tokens": COST}, "no max_tokens": UNSTATED}
START_S = 240
# The limits of the key that `custom_auth` states; those of a key in the database are enforced by the same code.
KEY = """from litellm.proxy._types import UserAPIKeyAuth

async def authenticate(request, api_key):
    return UserAPIKeyAuth(api_key=api_key, tpm_limit=%d)
"""
MODELS = """model_list:
  - model_name: m
    litellm_params: { model: openai/m, api_base: "http://127.0.0.1:%d/v1", api_key: x%s }
"""
ENVIRONMENT = {
    # Otherwise it downloads the prices of models.
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOG": "ERROR",
    # The key of the calls, which is no secret.
    "LITELLM_MASTER_KEY": model_apis.KEY,
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    "NO_PROXY": "*",
}
# By name: whether the key has the limit, what the deployment and the settings have, and how many processes there are.
PROXIES = {
    "tpm_limit of the key": (True, "", "", 1),
    "tpm_limit of the key, two processes": (True, "", "", 2),
    "tpm of the deployment, enforce_model_rate_limits": (
        False,
        f", tpm: {LIMIT}",
        "router_settings: { optional_pre_call_checks: [enforce_model_rate_limits], num_retries: 0 }\n",
        1,
    ),
    "tpm of the deployment, usage-based-routing-v2": (
        False,
        f", tpm: {LIMIT}",
        "router_settings: { routing_strategy: usage-based-routing-v2, num_retries: 0 }\n",
        1,
    ),
}


class LiteLlm:
    def __init__(self, command, model, has_key_limit, deployment, settings, processes):
        self.port = free_port()
        self.folder = tempfile.TemporaryDirectory()
        folder = pathlib.Path(self.folder.name)
        if has_key_limit:
            folder.joinpath("limits.py").write_text(KEY % LIMIT)
            settings += "general_settings: { custom_auth: limits.authenticate }\n"
        folder.joinpath("config.yaml").write_text(MODELS % (model.port, deployment) + settings)
        environment = {**os.environ, **ENVIRONMENT}
        options = ["--config", "config.yaml", "--host", "127.0.0.1", "--port", str(self.port), "--telemetry", "False"]
        options += ["--num_workers", str(processes)]
        self.process = start(os.path.abspath(command), *options, cwd=folder, env=environment, start_new_session=True)

    async def ready(self):
        end = time.monotonic() + START_S
        while (await get(self.port, "/health/liveliness"))[0] != 200:
            assert self.process.poll() is None and time.monotonic() < end, "the proxy does not serve"
            await asyncio.sleep(0.5)

    def stop(self):
        # With its processes.
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Transom(model_apis.Gateway):
    def __init__(self, binary, model, reserve):
        super().__init__(binary, model, f'{{ usage = "auto", reserve = {reserve} }}', LIMIT)


async def measure(name, make, request, at_a_time):
    model = Model()
    await model.start()
    gateway = make(model)
    await gateway.ready()
    places = asyncio.Semaphore(at_a_time)

    async def call():
        async with places:
            return await get(gateway.port, PATH, REQUESTS[request])

    began = time.monotonic()
    results = await asyncio.gather(*(call() for _ in range(CALLS)))
    seconds = time.monotonic() - began
    over = max(0, model.used - LIMIT)
    print(f"{name}; {request}, {at_a_time} at a time: used {model.used} of {LIMIT}, over by {over}; {count(results)} in {seconds:.1f} s", flush=True)
    gateway.stop()


async def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--binary", default=ROOT / "target/release/transom")
    parser.add_argument("--litellm", required=True, help="the command of LiteLLM's proxy")
    options = parser.parse_args()
    for request, at_a_time in itertools.product(REQUESTS, (CALLS, 20)):
        for reserve in (f'{{ json = "/max_tokens", default = {COST} }}', COST // 10):
            await measure(f"transom, reserve = {reserve}", lambda model: Transom(options.binary, model, reserve), request, at_a_time)
        for name, proxy in PROXIES.items():
            await measure(f"LiteLLM, {name}", lambda model: LiteLlm(options.litellm, model, *proxy), request, at_a_time)


if __name__ == "__main__":
    try:
        asyncio.run(main())
    finally:
        for process in model_apis.PROCESSES:
            process.kill()
            process.wait()
