"""Calls model_server.py through a gateway with the SDKs of OpenAI, Anthropic and Google, or with LiteLLM.

    model_sdks.py HOST:PORT ADMIN-HOST:PORT sdks|litellm

Expects rules `openai-requests` (3 a minute, cost in `x-cost`) and `openai-tokens` (100 a minute) by API key, likewise for `anthropic` and
`google`, and a window that ends in 1.5 seconds. Prints `ok NAME` or `FAILED NAME: why` for each check, and fails if one of them failed.
"""

import json
import os
import sys
import traceback
import unittest.mock
import urllib.request

WAIT_S = 1.5
PROMPT = "one two three"
ANSWER = "word " * 20
REQUEST = {"model": "m", "max_tokens": 20, "messages": [{"role": "user", "content": PROMPT}]}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "The weather in a city.", "parameters": PARAMETERS}
TOOL_RESULT = "sunny in Rome"


def assert_equal(actual, expected):
    if actual != expected:
        raise AssertionError(f"{actual!r:.500} instead of {expected!r:.500}")


class OpenAi:
    name = "openai"
    fields = [f"x-ratelimit-{what}-tokens" for what in ("limit", "remaining", "reset")]
    reset = "1.5s"

    def __init__(self, address, key, max_retries):
        import openai

        self.errors = openai.RateLimitError
        client = openai.DefaultHttpxClient(trust_env=False)
        sdk = openai.OpenAI(
            api_key=key, base_url=f"http://{address}/v1", max_retries=max_retries, http_client=client
        )
        self.messages = sdk.chat.completions

    def complete(self, is_streamed=False, **request):
        if not is_streamed:
            return self.messages.create(**request)
        with self.messages.stream(**request, stream_options={"include_usage": True}) as stream:
            return stream.get_final_completion()

    def call(self, **more):
        return self.complete(**{**REQUEST, **more}).choices[0].message.content

    def fields_of_call(self):
        headers = self.messages.with_raw_response.create(**REQUEST).headers
        return [headers[name] for name in self.fields]

    def stream(self, **more):
        options = {"include_usage": True}
        with self.messages.create(**{**REQUEST, **more}, stream=True, stream_options=options) as stream:
            for event in stream:
                yield (event.choices[0].delta.content or "") if event.choices else ""

    def call_with_tool(self, is_streamed):
        messages = list(REQUEST["messages"])
        request = {**REQUEST, "messages": messages, "tools": [{"type": "function", "function": FUNCTION}]}
        message = self.complete(is_streamed, **request).choices[0].message
        [call] = message.tool_calls
        assert_equal((call.function.name, json.loads(call.function.arguments)), ("weather", {"city": "Rome"}))
        asked = {"id": call.id, "type": "function", "function": {"name": "weather", "arguments": "{}"}}
        messages.append({"role": "assistant", "tool_calls": [asked]})
        messages.append({"role": "tool", "tool_call_id": call.id, "content": TOOL_RESULT})
        return self.complete(is_streamed, **request).choices[0].message.content

    def check_error(self, error):
        assert_equal((error.code, error.type, error.param), ("rate_limit_exceeded", "requests", None))


class Anthropic:
    name = "anthropic"
    fields = [f"anthropic-ratelimit-tokens-{what}" for what in ("limit", "remaining", "reset")]
    reset = "2024-10-04T00:01:00Z"

    def __init__(self, address, key, max_retries):
        import anthropic

        self.errors = anthropic.RateLimitError
        client = anthropic.DefaultHttpxClient(trust_env=False)
        sdk = anthropic.Anthropic(
            api_key=key, base_url=f"http://{address}", max_retries=max_retries, http_client=client
        )
        self.messages = sdk.messages

    def call(self, **more):
        return self.messages.create(**{**REQUEST, **more}).content[0].text

    def fields_of_call(self):
        headers = self.messages.with_raw_response.create(**REQUEST).headers
        return [headers[name] for name in self.fields]

    def stream(self, **more):
        with self.messages.create(**{**REQUEST, **more}, stream=True) as stream:
            for event in stream:
                yield event.delta.text if event.type == "content_block_delta" else ""

    def call_with_tool(self, is_streamed):
        tools = [{"name": "weather", "description": FUNCTION["description"], "input_schema": PARAMETERS}]

        def complete(messages):
            request = {**REQUEST, "messages": messages, "tools": tools}
            if not is_streamed:
                return self.messages.create(**request)
            with self.messages.stream(**request) as stream:
                return stream.get_final_message()

        messages = list(REQUEST["messages"])
        [call] = complete(messages).content
        assert_equal((call.name, call.input), ("weather", {"city": "Rome"}))
        asked = {"type": "tool_use", "id": call.id, "name": "weather", "input": {}}
        result = {"type": "tool_result", "tool_use_id": call.id, "content": TOOL_RESULT}
        messages += [{"role": "assistant", "content": [asked]}, {"role": "user", "content": [result]}]
        return complete(messages).content[0].text

    def check_error(self, error):
        assert_equal(error.body["error"]["type"], "rate_limit_error")


class Google:
    name = "google"

    def __init__(self, address, key, max_retries):
        from google import genai

        self.errors = genai.errors.ClientError
        self.types = genai.types
        retries = {"attempts": max_retries + 1, "jitter": 0}
        arguments = {"trust_env": False}
        options = {"base_url": f"http://{address}", "retry_options": retries, "client_args": arguments}
        # The SDK closes its connections when the client is dropped.
        self.client = genai.Client(api_key=key, vertexai=False, http_options=options)
        self.models = self.client.models

    def request(self, model="m", extra_headers=None, **config):
        config["http_options"] = {"headers": extra_headers} if extra_headers else None
        config = self.types.GenerateContentConfig(max_output_tokens=20, **config)
        return {"model": model, "contents": PROMPT, "config": config}

    def call(self, **more):
        return self.models.generate_content(**self.request(**more)).text

    def stream(self, **more):
        for event in self.models.generate_content_stream(**self.request(**more)):
            yield event.text or ""

    def call_with_tool(self, is_streamed):
        cities = []

        def weather(city: str) -> str:
            cities.append(city)
            return TOOL_RESULT

        # The SDK calls the function itself.
        chat = self.client.chats.create(model="m", config=self.request(tools=[weather])["config"])
        events = chat.send_message_stream(PROMPT) if is_streamed else [chat.send_message(PROMPT)]
        text = "".join(event.text or "" for event in events)
        assert_equal(cities, ["Rome"])
        return text

    def check_error(self, error):
        assert_equal(error.details["error"]["code"], "rate_limit_exceeded")


class LiteLlm(OpenAi):
    """LiteLLM's client for the API of OpenAI, in whose SDK it ends."""

    def __init__(self, address, key, max_retries):
        # Otherwise it downloads the prices of models.
        os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
        import litellm

        self.errors = litellm.exceptions.RateLimitError
        self.litellm = litellm
        self.options = {"api_base": f"http://{address}/v1", "api_key": key, "max_retries": max_retries}

    def complete(self, is_streamed=False, **request):
        options = {"stream": True, "stream_options": {"include_usage": True}} if is_streamed else {}
        model = f"openai/{request.pop('model')}"
        answer = self.litellm.completion(model=model, **request, **self.options, **options)
        return self.litellm.stream_chunk_builder(list(answer)) if is_streamed else answer

    def stream(self, **more):
        request = {**REQUEST, **more, **self.options, "stream_options": {"include_usage": True}}
        request["model"] = f"openai/{request['model']}"
        stream = self.litellm.completion(**request, stream=True)
        for event in stream:
            yield (event.choices[0].delta.content or "") if event.choices else ""

    def check_error(self, _error):
        """The error has neither code nor type, but the response, which the caller checks."""


def refused(sdk, **more):
    """The error of a call, and how long the SDK has waited before each retry."""
    waits = []
    with unittest.mock.patch("time.sleep", waits.append):
        try:
            sdk.call(**more)
        except sdk.errors as error:
            return error, waits
    raise AssertionError("the call was not refused")


def open_url(url, body=None):
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, body).read()


def fields_are_those_of_the_api(api, address, _admin):
    sdk = api(address, "fields", 0)
    # A call has 3 tokens of input and 20 of output, of which 20 are reserved.
    assert_equal([sdk.fields_of_call() for _ in range(2)], [["100", "80", api.reset], ["100", "57", api.reset]])


def streams_pass(api, address, _admin):
    sdk = api(address, "streams", 0)
    assert_equal(sdk.call(), ANSWER)
    assert_equal("".join(sdk.stream()), ANSWER)


def tools_are_called(api, address, _admin):
    # Two calls each; the rule permits three.
    for is_streamed in (False, True):
        assert_equal(api(address, f"tools {is_streamed}", 0).call_with_tool(is_streamed), ANSWER)


def a_stream_is_left_in_the_middle(api, address, _admin):
    stream = api(address, "left", 0).stream(model="slow")
    while next(stream) != "word ":
        pass
    stream.close()


def retries_wait_as_long_as_stated(api, address, _admin):
    sdk = api(address, "retries", 2)
    for _ in range(3):
        sdk.call()
    error, waits = refused(sdk)
    sdk.check_error(error)
    assert_equal(error.response.status_code, 429)
    assert_equal(error.response.headers["retry-after-ms"], str(int(WAIT_S * 1000)))
    assert_equal(error.response.headers["retry-after"], "2")
    # Google's SDK has intervals of its own.
    assert_equal(waits, [1, 2] if api is Google else [WAIT_S, WAIT_S])
    if "limit 3. Please try again in 2s." not in error.message:
        raise AssertionError(error.message)


def a_retry_is_admitted_once_the_limit_has_room(api, address, admin):
    sdk = api(address, "admitted", 2)
    for _ in range(3):
        sdk.call()
    waits = []

    def wait(seconds):
        """Instead of the clock, which the test moves."""
        waits.append(seconds)
        open_url(f"http://{admin}/v1/reset", json.dumps({"rule": f"{api.name}-requests", "key": "admitted"}).encode())

    with unittest.mock.patch("time.sleep", wait):
        assert_equal(sdk.call(), ANSWER)
    assert_equal(waits, [1 if api is Google else WAIT_S])


def what_can_never_be_admitted_is_not_retried(api, address, _admin):
    error, waits = refused(api(address, "never", 2), extra_headers={"x-cost": "4"})
    assert_equal((error.response.status_code, waits), (429, []))


COMMON = [
    streams_pass,
    tools_are_called,
    a_stream_is_left_in_the_middle,
    retries_wait_as_long_as_stated,
    a_retry_is_admitted_once_the_limit_has_room,
]
OF_THE_API = [fields_are_those_of_the_api, what_can_never_be_admitted_is_not_retried]
CHECKS = {
    "sdks": {OpenAi: COMMON + OF_THE_API, Anthropic: COMMON + OF_THE_API, Google: COMMON},
    "litellm": {LiteLlm: COMMON},
}


def main():
    address, admin, part = sys.argv[1:]
    failed = False
    for api, checks in CHECKS[part].items():
        for check in checks:
            try:
                check(api, address, admin)
                print(f"ok {api.name}: {check.__name__}")
            except Exception:
                failed = True
                print(f"FAILED {api.name}: {check.__name__}: {traceback.format_exc()}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
