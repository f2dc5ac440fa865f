"""A small server that speaks as much of the hub's protocol as huggingface_hub needs to download a
model.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

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
    """Counts what it is asked. The first ``cut`` downloads of a large file end in its middle."""

    repositories: dict[str, FakeRepository] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    cut: int = 0
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
                path = urlsplit(unquote(self.path)).path
                status, headers, content = hub.reply(path, dict(self.headers))
                self.send_response(status)
                headers.setdefault("Content-Length", str(len(content)))
                for key, value in headers.items():
                    self.send_header(key, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)
                if len(content) < int(headers["Content-Length"]):
                    self.close_connection = True

            do_GET = do_HEAD = _answer

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), HubHandler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    # ------------------------------------------------------------------------------- what it says
    def reply(self, path: str, headers: dict[str, str]) -> Reply:
        given = {key.lower(): value for key, value in headers.items()}
        if path.startswith("/objects/"):
            return self._object(path.rpartition("/")[2], given)
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
            return self._api(repository, match["name"], rest)
        return self._resolve(repository, rest)

    def _api(self, repository: FakeRepository, name: str, rest: str) -> Reply:
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
        return error(404, "EntryNotFound", "Not found")

    def _object(self, oid: str, given: dict[str, str]) -> Reply:
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
