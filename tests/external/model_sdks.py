"""Calls model_server.py through a gateway with the SDKs of OpenAI and Anthropic.

    model_sdks.py HOST:PORT ADMIN-HOST:PORT

Expects rules `openai-requests` (3 a minute, cost in `x-cost`) and `openai-tokens` (100 a minute) by API key, likewise for `anthropic`, and a
window that ends in 1.5 seconds. Prints `ok NAME` or `FAILED NAME: why` for each check, and fails if one of them failed.
"""

import json
import sys
import traceback
import unittest.mock
import urllib.request

import anthropic
import openai

WAIT_S = 1.5
REQUEST = {"model": "m", "max_tokens": 20, "messages": [{"role": "user", "content": "one two three"}]}


def assert_equal(actual, expected):
    if actual != expected:
        raise AssertionError(f"{actual!r:.500} instead of {expected!r:.500}")


class OpenAi:
    name = "openai"
    errors = openai
    fields = [f"x-ratelimit-{what}-tokens" for what in ("limit", "remaining", "reset")]
    reset = "1.5s"

    def __init__(self, address, key, max_retries):
        client = openai.DefaultHttpxClient(trust_env=False)
        sdk = openai.OpenAI(
            api_key=key, base_url=f"http://{address}/v1", max_retries=max_retries, http_client=client
        )
        self.messages = sdk.chat.completions

    def text(self, message):
        return message.choices[0].message.content

    def delta(self, event):
        return event.choices[0].delta.content if event.choices else ""

    def check_error(self, error):
        assert_equal((error.code, error.type, error.param), ("rate_limit_exceeded", "requests", None))


class Anthropic:
    name = "anthropic"
    errors = anthropic
    fields = [f"anthropic-ratelimit-tokens-{what}" for what in ("limit", "remaining", "reset")]
    reset = "2024-10-04T00:01:00Z"

    def __init__(self, address, key, max_retries):
        client = anthropic.DefaultHttpxClient(trust_env=False)
        sdk = anthropic.Anthropic(
            api_key=key, base_url=f"http://{address}", max_retries=max_retries, http_client=client
        )
        self.messages = sdk.messages

    def text(self, message):
        return message.content[0].text

    def delta(self, event):
        return event.delta.text if event.type == "content_block_delta" else ""

    def check_error(self, error):
        assert_equal(error.body["error"]["type"], "rate_limit_error")


def refused(sdk, **more):
    """The error of a call, and how long the SDK has waited before each retry."""
    waits = []
    with unittest.mock.patch("time.sleep", waits.append):
        try:
            sdk.messages.create(**REQUEST, **more)
        except sdk.errors.RateLimitError as error:
            return error, waits
    raise AssertionError("the call was not refused")


def fields_are_those_of_the_api(api, address, _admin):
    raw = api(address, "fields", 0).messages.with_raw_response
    headers = [raw.create(**REQUEST).headers for _ in range(2)]
    states = [[fields[name] for name in api.fields] for fields in headers]
    # A call has 3 tokens of input and 20 of output, of which 20 are reserved.
    assert_equal(states, [["100", "80", api.reset], ["100", "57", api.reset]])


def streams_pass(api, address, _admin):
    sdk = api(address, "streams", 0)
    assert_equal(sdk.text(sdk.messages.create(**REQUEST)), "word " * 20)
    more = {"stream_options": {"include_usage": True}} if api is OpenAi else {}
    with sdk.messages.create(**REQUEST, stream=True, **more) as stream:
        assert_equal("".join(sdk.delta(event) or "" for event in stream), "word " * 20)


def retries_wait_as_long_as_stated(api, address, _admin):
    sdk = api(address, "retries", 2)
    for _ in range(3):
        sdk.messages.create(**REQUEST)
    error, waits = refused(sdk)
    sdk.check_error(error)
    assert_equal(error.status_code, 429)
    assert_equal(error.response.headers["retry-after-ms"], str(int(WAIT_S * 1000)))
    assert_equal(error.response.headers["retry-after"], "2")
    assert_equal(waits, [WAIT_S, WAIT_S])
    if "limit 3. Please try again in 2s." not in error.message:
        raise AssertionError(error.message)


def a_retry_is_admitted_once_the_limit_has_room(api, address, admin):
    sdk = api(address, "admitted", 2)
    for _ in range(3):
        sdk.messages.create(**REQUEST)
    waits = []

    def wait(seconds):
        """Instead of the clock, which the test moves."""
        waits.append(seconds)
        question = json.dumps({"rule": f"{api.name}-requests", "key": "admitted"}).encode()
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"http://{admin}/v1/reset", question).read()

    with unittest.mock.patch("time.sleep", wait):
        assert_equal(sdk.text(sdk.messages.create(**REQUEST)), "word " * 20)
    assert_equal(waits, [WAIT_S])


def what_can_never_be_admitted_is_not_retried(api, address, _admin):
    error, waits = refused(api(address, "never", 2), extra_headers={"x-cost": "4"})
    assert_equal((error.status_code, waits), (429, []))


CHECKS = [
    fields_are_those_of_the_api,
    streams_pass,
    retries_wait_as_long_as_stated,
    a_retry_is_admitted_once_the_limit_has_room,
    what_can_never_be_admitted_is_not_retried,
]


def main():
    address, admin = sys.argv[1:]
    failed = False
    for api in (OpenAi, Anthropic):
        for check in CHECKS:
            try:
                check(api, address, admin)
                print(f"ok {api.name}: {check.__name__}")
            except Exception:
                failed = True
                print(f"FAILED {api.name}: {check.__name__}: {traceback.format_exc()}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
