"""An OpenID Connect provider of this machine, which vouches for whoever a test says stands there."""

import json
import secrets
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlencode, urlsplit

from joserfc import jwt
from joserfc.jwk import RSAKey

CLIENT = "ddtree-bench"
WELL_KNOWN = "/.well-known/openid-configuration"


@dataclass
class Provider:
    """What is asked of it, and whom it vouches for next."""

    address: str
    key: object
    person: dict = field(default_factory=dict)
    asked: list = field(default_factory=list)  # of whoever is sent to it
    _codes: dict = field(default_factory=dict)

    def said_to(self, path, query):
        """Answer a browser, or the pages' server: a status, headers, and what is said."""
        if path == WELL_KNOWN:
            return 200, {}, self._about()
        if path == "/keys":
            public = self.key.as_dict(private=False) | {"use": "sig", "alg": "RS256"}
            return 200, {}, {"keys": [public]}
        if path == "/authorize":
            self.asked.append(query)
            code = secrets.token_hex(8)
            self._codes[code] = query | {"person": dict(self.person)}
            back = urlencode({"code": code, "state": query["state"]})
            return 302, {"Location": f"{query['redirect_uri']}?{back}"}, {}
        if path == "/token":
            return 200, {}, self._token(self._codes.pop(query["code"]))
        return 404, {}, {}

    def _about(self):
        where = {
            "authorization_endpoint": f"{self.address}/authorize",
            "token_endpoint": f"{self.address}/token",
            "jwks_uri": f"{self.address}/keys",
        }
        return where | {
            "issuer": self.address,
            "response_types_supported": ["code"],
            "subject_types_supported": ["public"],
            "id_token_signing_alg_values_supported": ["RS256"],
            "code_challenge_methods_supported": ["S256"],
        }

    def _token(self, asked):
        now = int(time.time())
        claims = {"iss": self.address, "sub": "42", "aud": CLIENT, "iat": now, "exp": now + 3600}
        claims |= asked["person"] | {"nonce": asked["nonce"]}
        told = jwt.encode({"alg": "RS256", "kid": "one"}, claims, self.key)
        return {"access_token": "x", "token_type": "Bearer", "expires_in": 3600, "id_token": told}


@contextmanager
def provided():
    """Run a provider until it is asked nothing more."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked = urlsplit(self.path)
            self.answer(asked.path, dict(parse_qsl(asked.query)))

        def do_POST(self):
            said = self.rfile.read(int(self.headers["Content-Length"])).decode()
            self.answer(self.path, dict(parse_qsl(said)))

        def answer(self, path, query):
            status, headers, said = provider.said_to(path, query)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(json.dumps(said).encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    key = RSAKey.generate_key(2048, parameters={"kid": "one"})
    provider = Provider(f"http://127.0.0.1:{server.server_port}", key)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield provider
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
