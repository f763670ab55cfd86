# SPDX-License-Identifier: Apache-2.0
"""A server that answers like SGLang and misbehaves on request.

The environment says how: FAKE_PREFILL, FAKE_DECODE and FAKE_AGGREGATED may be `dies` (at start),
`hangs` (never listens), `dies-later` (at the first request) or `lies` (other tokens).
"""

import argparse
import json
import multiprocessing
import os
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CONTEXT = 1024
WORDS = 500


def tokens(prompt, count, wrong=False):
    """Tokens that depend on the whole prompt."""
    seed = sum((place + 1) * word for place, word in enumerate(prompt)) + wrong
    return [(seed * 31 + place * 17) % WORDS for place in range(count)]


class Handler(BaseHTTPRequestHandler):
    behaviour = ""
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def reply(self, status, body, kind="application/json"):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        known = ("/model_info", "/health_generate", "/readiness")
        self.reply(200 if self.path in known else 404, b"{}")

    def do_POST(self):
        if self.behaviour == "dies-later":
            print("RuntimeError: the fake server was told to die", flush=True)
            os._exit(7)
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt, count = asked["input_ids"], asked["sampling_params"]["max_new_tokens"]
        if len(prompt) > CONTEXT:
            message = f"The input ({len(prompt)} tokens) is longer than {CONTEXT}."
            self.reply(400, json.dumps({"error": {"message": message}}).encode())
            return
        output = tokens(prompt, count, self.behaviour == "lies")
        meta = {"finish_reason": {"type": "length"}, "spec_accept_length": 3.5}
        meta |= {"num_retractions": 0, "cached_tokens": 0}
        last = {"output_ids": output, "meta_info": meta}
        if not asked.get("stream"):
            self.reply(200, json.dumps(last).encode())
            return
        first = {"output_ids": output[:1], "meta_info": {**meta, "finish_reason": None}}
        events = [json.dumps(event) for event in (first, last)]
        stream = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])
        self.reply(200, stream.encode(), "text/event-stream")


class Server(ThreadingHTTPServer):
    request_queue_size = 256


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--disaggregation-mode", default="aggregated")
    given, _ = parser.parse_known_args()
    behaviour = os.environ.get(f"FAKE_{given.disaggregation_mode.upper()}", "")
    print(f"fake {given.disaggregation_mode} server, told: {behaviour or 'nothing'}", flush=True)
    # SGLang's scheduler is such a child; it must end with the server.
    multiprocessing.set_start_method("spawn", force=True)
    multiprocessing.Process(target=time.sleep, args=(600,), daemon=True).start()
    if behaviour == "dies":
        raise RuntimeError("the fake server was told to die")
    if behaviour == "hangs":
        time.sleep(600)
    Handler.behaviour = behaviour
    Server(("127.0.0.1", given.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
