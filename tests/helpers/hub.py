"""A small server that speaks as much of the hub's protocol as huggingface_hub needs to download a
model and to upload one.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

Reply = tuple[int, dict[str, str], bytes]
Files = dict[str, bytes]
_OF_REPOSITORY = re.compile(r"/(?P<api>api/models/)?(?P<name>[^/]+/[^/]+?)(\.git)?(?P<rest>/.*)?$")
_LARGE = 4096  # bytes: a file of at least so many is stored as an object of LFS


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass
class FakeRepository:
    """A model: the files of each commit, and where the branches are. ``gated``: 403 for all."""

    commits: dict[str, Files] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False

    def commit(self, files: Files, branch: str = "main") -> str:
        """Put the files in the place of those of the branch; return the commit."""
        text = json.dumps([len(self.commits), *sorted((n, sha(c)) for n, c in files.items())])
        name = hashlib.sha1(text.encode()).hexdigest()
        self.commits[name] = files
        self.branches[branch] = name
        return name

    def files_of(self, revision: str) -> tuple[str, Files] | None:
        name = self.branches.get(revision, revision)
        return (name, self.commits[name]) if name in self.commits else None

    @property
    def files(self) -> Files:
        return self.commits[self.branches["main"]]


@dataclass
class FakeHub:
    """Counts what it is asked. The first ``cut`` downloads of a large file end in its middle. A
    request that writes needs ``token``; the token ``reader`` has no right to write.
    """

    repositories: dict[str, FakeRepository] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    cut: int = 0
    token: str = "hf_writer"
    port: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """Return the variables by which huggingface_hub finds this server."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1,localhost",
            **more,
        }

    def add(self, name: str, directory: Path) -> FakeRepository:
        """Add a model with the files of a directory."""
        repository = FakeRepository()
        files = {}
        for path in sorted(directory.rglob("*")):
            if path.is_file():
                files[str(path.relative_to(directory))] = path.read_bytes()
        repository.commit(files)
        self.repositories[name] = repository
        return repository

    def downloads(self, suffix: str) -> int:
        """Return how often a file with this suffix was sent."""
        return sum(line.startswith("GET") and line.endswith(suffix) for line in self.asked)

    def start(self) -> FakeHub:
        hub = self

        class HubHandler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None: ...

            def _answer(self) -> None:
                with hub._lock:
                    hub.asked.append(f"{self.command} {unquote(self.path)}")
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length)
                status, headers, content = hub.reply(
                    self.command, urlsplit(unquote(self.path)).path, dict(self.headers), body
                )
                self.send_response(status)
                headers.setdefault("Content-Length", str(len(content)))
                for key, value in headers.items():
                    self.send_header(key, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)
                if len(content) < int(headers["Content-Length"]):
                    self.close_connection = True

            do_GET = do_HEAD = do_POST = do_PUT = _answer

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), HubHandler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    # ------------------------------------------------------------------------------- what it says
    def reply(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Reply:
        given = {key.lower(): value for key, value in headers.items()}
        writes = method in ("POST", "PUT") and not path.startswith("/objects/")
        if writes:
            token = given.get("authorization", "").removeprefix("Bearer ")
            if not token or token not in (self.token, "hf_reader"):
                return error(401, "", "Invalid username or password.")
            if token != self.token:
                return error(403, "", "You don't have the rights to write here")
        if path == "/api/validate-yaml":
            return _validated(json.loads(body)["content"])
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path.startswith("/objects/"):
            return self._object(method, path.rpartition("/")[2], given, body)
        match = _OF_REPOSITORY.match(path)
        if match is None:
            return error(404, "EntryNotFound", "Not found")
        repository = self.repositories.get(match["name"])
        if repository is None or (repository.private and not given.get("authorization")):
            return error(401, "RepoNotFound", "Repository not found")
        rest = match["rest"] or ""
        if repository.gated and not (match["api"] and rest in ("", "/revision/main")):
            return error(403, "GatedRepo", "Access to this model is restricted")
        if match["api"]:
            return self._api(repository, match["name"], rest, body)
        if rest == "/info/lfs/objects/batch":
            return self._batch(json.loads(body))
        return self._resolve(repository, rest)

    def _create(self, wanted: dict[str, Any]) -> Reply:
        owner = wanted.get("organization") or "me"
        name = f"{owner}/{wanted['name']}"
        if name in self.repositories:
            return reply({"error": "You already created this model repo"}, status=409)
        private = bool(wanted.get("private")) or wanted.get("visibility") == "private"
        made = FakeRepository(private=private)
        made.commit({})
        self.repositories[name] = made
        return reply({"url": f"{self.url}/{name}", "name": name})

    def _api(self, repository: FakeRepository, name: str, rest: str, body: bytes) -> Reply:
        what, _, revision = rest.strip("/").partition("/")
        if what in ("", "revision"):
            found = repository.files_of(revision or "main")
            if found is None:
                return error(404, "RevisionNotFound", "Revision not found")
            siblings = [{"rfilename": file} for file in found[1]]
            return reply(
                {
                    "id": name,
                    "sha": found[0],
                    "private": repository.private,
                    "gated": repository.gated,
                    "siblings": siblings,
                }
            )
        if what == "tree":
            found = repository.files_of(revision)
            if found is None:
                return error(404, "RevisionNotFound", "Revision not found")
            return reply([_entry(file, content) for file, content in found[1].items()])
        if what == "branch":
            repository.branches[revision] = repository.branches["main"]
            return reply({})
        if what == "preupload":
            files = [
                {
                    "path": one["path"],
                    "uploadMode": "lfs" if one["size"] >= _LARGE else "regular",
                    "shouldIgnore": False,
                }
                for one in json.loads(body)["files"]
            ]
            return reply({"files": files})
        if what == "commit":
            return self._commit(repository, name, revision, body)
        return error(404, "EntryNotFound", "Not found")

    def _commit(self, repository: FakeRepository, name: str, branch: str, body: bytes) -> Reply:
        if branch not in repository.branches:
            return error(404, "RevisionNotFound", "Revision not found")
        files = dict(repository.commits[repository.branches[branch]])
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.objects[value["oid"]]
        commit = repository.commit(files, branch)
        url = f"{self.url}/{name}/commit/{commit}"
        return reply({"commitUrl": url, "commitOid": commit, "pullRequestUrl": None})

    def _batch(self, wanted: dict[str, Any]) -> Reply:
        objects = []
        for one in wanted["objects"]:
            upload = {"href": f"{self.url}/objects/{one['oid']}"}
            objects.append({**one, "actions": {"upload": upload}})
        return reply({"transfer": "basic", "objects": objects})

    def _object(self, method: str, oid: str, given: dict[str, str], body: bytes) -> Reply:
        if method == "PUT":
            assert sha(body) == oid
            self.objects[oid] = body
            return 200, {}, b""
        content = self.objects[oid]
        headers = {"Content-Length": str(len(content)), "ETag": f'"{oid}"'}
        start = re.fullmatch(r"bytes=(\d+)-", given.get("range", ""))
        status = 200
        if start:
            status = 206
            first = int(start[1])
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
            content = content[first:]
            headers["Content-Length"] = str(len(content))
        with self._lock:
            is_cut = self.cut > 0
            self.cut -= is_cut
        return status, headers, content[: len(content) // 2] if is_cut else content

    def _resolve(self, repository: FakeRepository, rest: str) -> Reply:
        match = re.match(r"/resolve/(?P<revision>[^/]+)/(?P<file>.+)", rest)
        found = repository.files_of(match["revision"]) if match else None
        if match is None or found is None:
            return error(404, "RevisionNotFound", "Revision not found")
        commit, files = found
        if match["file"] not in files:
            return error(404, "EntryNotFound", "Entry not found")
        content = files[match["file"]]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_blob(content)}"'}
        if len(content) < _LARGE:
            return 200, headers, content
        oid = sha(content)
        self.objects[oid] = content
        headers |= {
            # elsewhere, as the hub's own objects are: a client must not send its token there
            "Location": f"http://localhost:{self.port}/objects/{oid}",
            "X-Linked-Etag": f'"{oid}"',
            "X-Linked-Size": str(len(content)),
        }
        return 302, headers, b""


def _validated(card: str) -> Reply:
    try:
        is_mapping = isinstance(yaml.safe_load(card.split("---\n")[1]), dict)
    except (IndexError, yaml.YAMLError):
        is_mapping = not card.startswith("---")
    faults = [] if is_mapping else [{"message": "no mapping"}]
    return reply({"errors": faults, "warnings": []}, status=400 if faults else 200)


def _blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _entry(file: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "type": "file",
        "path": file,
        "size": len(content),
        "oid": _blob(content),
    }
    if len(content) >= _LARGE:
        entry["lfs"] = {"oid": sha(content), "size": len(content), "pointerSize": 130}
    return entry


def reply(value: object, status: int = 200) -> Reply:
    return status, {"Content-Type": "application/json"}, json.dumps(value).encode()


def error(status: int, code: str, message: str) -> Reply:
    headers = {"X-Error-Message": message}
    if code:
        headers["X-Error-Code"] = code
    return status, headers, b""
