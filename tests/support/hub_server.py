"""A stand-in of the Hugging Face Hub: the HTTP endpoints that huggingface_hub calls for downloads and uploads.

Downloads: ``GET api/models/ID/revision/R``, ``api/models/ID/tree/C``, ``ID/resolve/C/FILE``. Uploads, in huggingface_hub 1 and 2
without hf_xet (HF_HUB_DISABLE_XET=1): ``GET api/whoami-v2``, ``POST api/repos/create``, ``api/validate-yaml``,
``api/models/ID/preupload/R``, ``ID.git/info/lfs/objects/batch`` with ``PUT`` and ``POST`` to the addresses in its answer, and
``api/models/ID/commit/R``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

COMMIT = "0123456789abcdef0123456789abcdef01234567"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


@dataclass
class HubState:
    """Contents of a Hub.

    Attributes:
        files: content of each file, by kind and name of its repository (``models/owner/name``).
        private: the private ones among them.
        accounts: by token: the answer of whoami, and the namespaces in which it may write.
        failing: parts of paths whose requests fail with the status 500.
        requests: paths of all requests.
        address: of the server.
    """

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)
    accounts: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = field(default_factory=dict)
    failing: set[str] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    address: str = ""

    def add_account(self, token: str, name: str, role: str, *writable: str) -> None:
        """Add a token of an account that is a member of the organisation ``team``."""
        access = {"displayName": f"{name}'s", "role": role}
        answer = {"type": "user", "name": name, "orgs": [{"name": "team"}], "auth": {"accessToken": access}}
        self.accounts[token] = answer, writable


class _Handler(BaseHTTPRequestHandler):
    state: HubState
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def _answer(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        body = self._body()
        self.state.requests.append(path)
        if any(part in path for part in self.state.failing):
            self._send({"error": "the stand-in fails here"}, status=500)
        elif self.command in ("GET", "HEAD"):
            self._read(path)
        else:
            self._write(path, body)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    # --- downloads, and the account ---

    def _read(self, path: str) -> None:
        if path == "api/whoami-v2":
            account = self._account()
            self._send({"error": "Invalid credentials"}, status=401) if account is None else self._send(account[0])
            return
        for repository, files in self.state.files.items():
            api, plain = f"api/{repository}", repository.removeprefix("models/")
            if path in (api, f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
                siblings = [{"rfilename": name} for name in files]
                self._send({"id": plain, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []})
                return
            if path == f"{api}/tree/{COMMIT}":
                entries = [
                    {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                    for name, content in files.items()
                ]
                self._send(entries)
                return
            name = path.removeprefix(f"{plain}/resolve/{COMMIT}/")
            if name in files:
                etag = hashlib.sha1(files[name]).hexdigest()
                self._send(files[name], {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})
                return
        self._send(b"", {"X-Error-Code": "RepoNotFound"}, status=404)

    # --- uploads ---

    def _account(self) -> tuple[dict[str, Any], tuple[str, ...]] | None:
        return self.state.accounts.get(self.headers.get("Authorization", "").removeprefix("Bearer "))

    def _write(self, path: str, body: bytes) -> None:
        if path.startswith("storage/"):  # as at the Hub, the address itself is the permission
            self._store(path.removeprefix("storage/"), body)
            return
        account = self._account()
        if account is None:
            self._send({"error": "Invalid credentials"}, status=401)
        elif path == "api/validate-yaml":
            self._validate(json.loads(body))
        elif path == "api/repos/create":
            self._create(json.loads(body), account[1])
        elif match := re.fullmatch(r"(api/models/)?(?P<name>[^/]+/[^/]+?)(\.git)?/(?P<call>.*)", path):
            if match["name"].partition("/")[0] not in account[1]:
                self._send({"error": "you need write access"}, status=403)
            elif f"models/{match['name']}" not in self.state.files:
                self._send({"error": "not found"}, {"X-Error-Code": "RepoNotFound"}, status=404)
            else:
                self._change(match["name"], match["call"], body)
        else:
            self._send({"error": f"unknown: {path}"}, status=404)

    def _create(self, request: dict[str, Any], writable: tuple[str, ...]) -> None:
        repository = f"{request['organization']}/{request['name']}"
        key, address = f"models/{repository}", {"url": f"{self.state.address}/{repository}"}
        if request["organization"] not in writable:
            self._send({"error": "you cannot create repositories here"}, status=403)
        elif key in self.state.files:
            self._send(address, status=409)
        else:
            self.state.files[key] = {".gitattributes": b"*.safetensors filter=lfs\n"}
            # Versions of huggingface_hub differ in the name.
            if request.get("private") or request.get("visibility") == "private":
                self.state.private.add(repository)
            self._send(address)

    def _validate(self, request: dict[str, Any]) -> None:
        metadata = yaml.safe_load(request["content"].split("---")[1]) if request["content"].startswith("---") else {}
        names = [metadata["base_model"]] if "base_model" in metadata else []
        wrong = [name for name in (*names, *metadata.get("datasets", ())) if not HUB_NAME.fullmatch(name)]
        if wrong:
            self._send({"errors": [{"message": f"not names on the Hub: {wrong}"}]}, status=400)
        else:
            self._send({"errors": [], "warnings": []})

    def _change(self, repository: str, call: str, body: bytes) -> None:
        files = self.state.files[f"models/{repository}"]
        if call == "preupload/main":
            answers = []
            for entry in json.loads(body)["files"]:
                mode = "lfs" if entry["path"].endswith(".safetensors") else "regular"
                answers.append({"path": entry["path"], "uploadMode": mode, "shouldIgnore": False, "oid": None})
            self._send({"files": answers})
        elif call == "info/lfs/objects/batch":
            objects = []
            for entry in json.loads(body)["objects"]:
                address = f"{self.state.address}/storage/{entry['oid']}"
                actions = {"upload": {"href": address}, "verify": {"href": f"{address}/{entry['size']}"}}
                objects.append(entry if entry["oid"] in self.state.objects else entry | {"actions": actions})
            self._send({"transfer": "basic", "objects": objects})
        elif call == "commit/main":
            for line in body.splitlines():
                operation = json.loads(line)
                value = operation["value"]
                if operation["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif operation["key"] == "lfsFile":
                    files[value["path"]] = self.state.objects[value["oid"]]
            address = f"{self.state.address}/{repository}/commit/{COMMIT}"
            self._send({"success": True, "commitUrl": address, "commitOid": COMMIT})
        else:
            self._send({"error": f"unknown: {call}"}, status=404)

    def _store(self, name: str, body: bytes) -> None:
        if self.command == "PUT":
            correct = hashlib.sha256(body).hexdigest() == name
            if correct:
                self.state.objects[name] = body
        else:
            oid, _, size = name.partition("/")
            correct = len(self.state.objects[oid]) == int(size)
        self._send({}, status=200 if correct else 400)

    def _send(self, body: Any, headers: dict[str, str] | None = None, *, status: int = 200) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def hub_server(state: HubState) -> Iterator[HubState]:
    """Serve ``state`` within the context, and set its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubHandler", (_Handler,), {"state": state}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    state.address = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
