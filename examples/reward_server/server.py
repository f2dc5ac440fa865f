"""A reward server in the standard library: python server.py [PORT]. Its reply is what
judging.verifier expects.

It gets {"items": [{"response", "answer", "problem", "columns"}, ...]} and returns {"results":
[...]}, one per item: true or false, a number from 0 to 1, an object with such a "score" and
anything to log, or {"error": "why"}. The response is the reasoning, without the stated confidence.
An empty batch asks whether the server is there. Put TLS and more processes before it where it
leaves this machine; DCPO_VERIFIER_KEY, where it is set on both sides, is the key that it demands.
"""

import hmac
import json
import os
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEY = os.environ.get("DCPO_VERIFIER_KEY", "")
MAX_BYTES = 64 << 20


def score(response, answer, problem, columns):
    """Right where the last number in the response is the answer; put your own rule or reward model
    here.
    """
    numbers = re.findall(r"-?\d+", response)
    return {"score": float(bool(numbers) and numbers[-1] == str(answer)), "numbers": len(numbers)}


def result_of(item):
    """The result of an item; an error of one item is none of the others."""
    try:
        return score(**item)
    except Exception as error:  # of your rule
        return {"error": f"{type(error).__name__}: {str(error)[:200]}"}


class Handler(BaseHTTPRequestHandler):
    timeout = 30  # seconds in which a client has to go on sending

    def do_POST(self):
        given = self.headers.get("Authorization", "").encode(errors="replace")
        if KEY and not hmac.compare_digest(given, f"Bearer {KEY}".encode()):
            return self.send_error(401)
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            return self.send_error(411)
        if int(length) > MAX_BYTES:
            return self.send_error(413)
        try:
            results = [
                result_of(item) for item in json.loads(self.rfile.read(int(length)))["items"]
            ]
        except (ValueError, LookupError, TypeError, RecursionError):
            return self.send_error(400)
        body = json.dumps({"results": results}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    server = ThreadingHTTPServer(
        ("127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else 8008), Handler
    )
    print(f"listening on http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
