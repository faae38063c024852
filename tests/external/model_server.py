"""A small server with the APIs of models: OpenAI chat completions and embeddings, Anthropic messages, and Gemini, streamed or not.

    python3 tests/external/model_server.py     # prints its address

An answer has as many words as the request permits (default 10), each of which is a token, and the words of the prompt are the tokens of
the input. If the request has tools and no result of one, the answer calls the tool `weather`. A stream of the model `slow` ends after
half of its events: it waits until the client goes away.

`GET /used` states the tokens of all answers, as the server has counted them, and how many streams the client has left (`aborted`), whose
tokens are not among them.
"""

import contextlib
import http.server
import json
import threading

USED = {"input": 0, "output": 0, "aborted": 0}
LOCK = threading.Lock()
ARGUMENTS = {"city": "Rome"}


def words(value):
    """The number of words in the texts of messages."""
    if isinstance(value, list):
        return sum(map(words, value))
    if not isinstance(value, dict):
        return 0
    texts = [value[name] for name in ("text", "content", "result") if isinstance(value.get(name), str)]
    return sum(len(text.split()) for text in texts) + sum(map(words, value.values()))


def count_used(**used):
    with LOCK:
        for kind, number in used.items():
            USED[kind] += number


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


class Model(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        """`/used`."""
        self.answer(USED)

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        messages = request.get("messages") or request.get("contents") or [{"content": request.get("input", "")}]
        wants_tool = "tools" in request and not any(
            result in json.dumps(messages) for result in ('"tool"', '"tool_result"', '"functionResponse"')
        )
        limit = request.get("max_tokens") or request.get("generationConfig", {}).get("maxOutputTokens", 10)
        output = 0 if self.path.endswith("/embeddings") else limit
        self.is_slow = "slow" in (request.get("model") or self.path)
        if not self.is_slow:
            count_used(input=words(messages), output=output)
        if self.path.endswith("/messages"):
            self.anthropic(request, words(messages), output, wants_tool)
        elif "/models/" in self.path:
            self.gemini(words(messages), output, wants_tool)
        else:
            self.openai(request, words(messages), output, wants_tool)

    def openai(self, request, count, output, wants_tool):
        usage = {"prompt_tokens": count, "completion_tokens": output, "total_tokens": count + output}
        head = {"id": "chatcmpl-1", "created": 1, "model": request["model"]}
        function = {"name": "weather", "arguments": json.dumps(ARGUMENTS)}
        call = {"index": 0, "id": "call_1", "type": "function", "function": function}
        reason = "tool_calls" if wants_tool else "stop"
        if not request.get("stream"):
            what = {"tool_calls": [call]} if wants_tool else {"content": "word " * output}
            choice = {"index": 0, "message": {"role": "assistant", **what}, "finish_reason": reason}
            return self.answer({**head, "object": "chat.completion", "choices": [choice], "usage": usage})
        head["object"] = "chat.completion.chunk"
        has_usage = request.get("stream_options", {}).get("include_usage")
        deltas = [{"tool_calls": [call]}] if wants_tool else [{"content": "word "}] * output
        chunks = [{**head, "choices": [{"index": 0, "delta": delta}]} for delta in deltas]
        chunks.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        if has_usage:
            chunks = [{**chunk, "usage": None} for chunk in chunks] + [{**head, "choices": [], "usage": usage}]
        self.stream([f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"])

    def anthropic(self, request, count, output, wants_tool):
        usage = {"input_tokens": count, "output_tokens": output}
        end = {"stop_reason": "tool_use" if wants_tool else "end_turn", "stop_sequence": None}
        head = {"id": "msg_1", "type": "message", "role": "assistant", "model": request["model"]}
        call = {"type": "tool_use", "id": "toolu_1", "name": "weather"}
        if not request.get("stream"):
            block = {**call, "input": ARGUMENTS} if wants_tool else {"type": "text", "text": "word " * output}
            return self.answer({**head, **end, "content": [block], "usage": usage})
        start = {**head, "content": [], "usage": {"input_tokens": count, "output_tokens": 1}}
        if wants_tool:
            block = {**call, "input": {}}
            deltas = [{"type": "input_json_delta", "partial_json": json.dumps(ARGUMENTS)}]
        else:
            block, deltas = {"type": "text", "text": ""}, [{"type": "text_delta", "text": "word "}] * output
        events = [{"type": "message_start", "message": start}, {"type": "ping"}]
        events.append({"type": "content_block_start", "index": 0, "content_block": block})
        events += [{"type": "content_block_delta", "index": 0, "delta": delta} for delta in deltas]
        events.append({"type": "content_block_stop", "index": 0})
        events += [{"type": "message_delta", "delta": end, "usage": {"output_tokens": output}}, {"type": "message_stop"}]
        self.stream([f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events])

    def gemini(self, count, output, wants_tool):
        def answer(part, so_far, **more):
            content = {"role": "model", "parts": [part]}
            # Thoughts are not among the candidates.
            usage = {"promptTokenCount": count, "candidatesTokenCount": so_far - 1, "thoughtsTokenCount": 1}
            usage["totalTokenCount"] = count + so_far
            candidates = [{"index": 0, "content": content, **more}]
            return {"candidates": candidates, "usageMetadata": usage, "modelVersion": "m"}

        call = {"functionCall": {"name": "weather", "args": ARGUMENTS}}
        if ":streamGenerateContent" not in self.path:
            return self.answer(answer(call if wants_tool else {"text": "word " * output}, output, finishReason="STOP"))
        parts = [call] if wants_tool else [{"text": "word "}] * output
        events = [answer(part, number) for number, part in enumerate(parts, 1)]
        events[-1] = answer(parts[-1], output, finishReason="STOP")
        self.stream([f"data: {json.dumps(event)}\r\n\r\n" for event in events])

    def answer(self, value):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def stream(self, events):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        chunks = [f"{len(event):x}\r\n{event}\r\n".encode() for event in events]
        if self.is_slow:
            with contextlib.suppress(ConnectionError):
                self.wfile.write(b"".join(chunks[: len(chunks) // 2]))
                self.connection.recv(1)
            self.close_connection = True
            return count_used(aborted=1)
        for chunk in chunks:
            self.wfile.write(chunk)
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_):
        """Disables the log: the test reads the standard output."""


def main():
    server = Server(("127.0.0.1", 0), Model)
    print(f"listening on 127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
