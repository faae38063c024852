"""A small server with the API of a model: OpenAI chat completions, Anthropic messages, and embeddings, streamed or not.

    python3 tests/external/model_server.py     # prints its address

An answer has as many words as `max_tokens` says (default 10), each of which is a token, and the words of the prompt are the tokens of
the input. `GET /used` states the tokens of all answers, as the server has counted them.
"""

import http.server
import json
import threading

USED = {"input": 0, "output": 0}
LOCK = threading.Lock()


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


class Model(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        """`/used`."""
        self.answer({"input": USED["input"], "output": USED["output"]})

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        messages = request.get("messages") or [{"content": request.get("input", "")}]
        count = sum(len(message["content"].split()) for message in messages)
        output = 0 if self.path.endswith("/embeddings") else request.get("max_tokens", 10)
        with LOCK:
            USED["input"] += count
            USED["output"] += output
        if self.path.endswith("/messages"):
            self.anthropic(request, count, output)
        else:
            self.openai(request, count, output)

    def openai(self, request, count, output):
        usage = {"prompt_tokens": count, "completion_tokens": output, "total_tokens": count + output}
        head = {"id": "chatcmpl-1", "model": request["model"]}
        if not request.get("stream"):
            message = {"role": "assistant", "content": "word " * output}
            return self.answer({**head, "choices": [{"index": 0, "message": message}], "usage": usage})
        has_usage = request.get("stream_options", {}).get("include_usage")
        chunks = [{**head, "choices": [{"index": 0, "delta": {"content": "word "}}]} for _ in range(output)]
        if has_usage:
            chunks = [{**chunk, "usage": None} for chunk in chunks] + [{**head, "choices": [], "usage": usage}]
        self.stream([f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"])

    def anthropic(self, request, count, output):
        usage = {"input_tokens": count, "output_tokens": output}
        message = {"type": "message", "role": "assistant", "model": request["model"], "usage": usage}
        if not request.get("stream"):
            return self.answer({**message, "content": [{"type": "text", "text": "word " * output}]})
        start = {**message, "content": [], "usage": {"input_tokens": count, "output_tokens": 1}}
        events = [{"type": "message_start", "message": start}, {"type": "ping"}]
        events += [{"type": "content_block_delta", "delta": {"type": "text_delta", "text": "word "}}] * output
        events += [{"type": "message_delta", "usage": {"output_tokens": output}}, {"type": "message_stop"}]
        self.stream([f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events])

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
        for event in events:
            self.wfile.write(f"{len(event):x}\r\n{event}\r\n".encode())
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_):
        """Disables the log: the test reads the standard output."""


def main():
    server = Server(("127.0.0.1", 0), Model)
    print(f"listening on 127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
