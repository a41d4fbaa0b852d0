"""A stand-in for the server that surftrace asks for the types of functions. The requests are logged."""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer


class _Answers(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        """Log the request, and reply that the requested function returns an int and has no arguments."""
        [asked] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open(sys.argv[1], "a", encoding="utf-8") as log:
            print(self.path, asked["cmd"], asked["func"], file=log)
        found = [{"func": asked["func"], "ret": "int", "args": []}]
        text = json.dumps({"code": 200, "res": [{"log": "ok.", "res": found}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Do nothing, because do_POST() writes all lines of the log."""


if __name__ == "__main__":
    server = HTTPServer(("127.0.0.1", 80), _Answers)
    with open(sys.argv[1], "a", encoding="utf-8"):
        server.serve_forever()
