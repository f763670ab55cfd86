# SPDX-License-Identifier: Apache-2.0
"""A router that hands every request to the decode server."""

import argparse
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    decode = ""
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, body):
        try:
            with urllib.request.urlopen(self.decode + self.path, body) as reply:
                status, content = reply.status, reply.read()
        except urllib.error.HTTPError as error:
            status, content = error.code, error.read()
        except OSError as error:
            status, content = 503, str(error).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self):
        self.answer(None)

    def do_POST(self):
        self.answer(self.rfile.read(int(self.headers["Content-Length"])))


class Server(ThreadingHTTPServer):
    request_queue_size = 256


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--decode")
    given, _ = parser.parse_known_args()
    Handler.decode = given.decode
    Server(("127.0.0.1", given.port), Handler).serve_forever()
