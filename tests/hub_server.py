"""A small Hub on this machine that the real clients, huggingface_hub, transformers and datasets, talk to; all is in memory.

It speaks what they need to make models, data sets and Spaces, to upload (inline or by LFS), commit, list and download, and
refuses what the Hub refuses: writers without the token, content of another hash, tokens at the storage, deleting what is not there.
A plugin of pytest; PYTEST_DONT_REWRITE, as tests import it before pytest does.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from base64 import b64decode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from conftest import ROOT


TOKEN = "hf_" + "NeverToBeShown" * 2
NAME, REVISION = "(?P<name>[^/]+/[^/.]+)", "(?P<revision>[^/]+)"
REPO, API = f"/((?P<kind>datasets|spaces)/)?{NAME}", f"/api/(?P<kind>models|datasets|spaces)/{NAME}"
ROUTES = {  # of the method's name: verb and path
    "create": "POST /api/repos/create",
    "validate": "POST /api/validate-yaml",
    "preupload": f"POST {API}/preupload/main",
    "batch": rf"POST {REPO}\.git/info/lfs/objects/batch",
    "commit": f"POST {API}/commit/main",
    "info": f"GET {API}(/revision/{REVISION})?",
    "tree": f"GET {API}/tree/{REVISION}(/(?P<path>.+))?",
    "resolve": f"GET {REPO}/resolve/{REVISION}/(?P<path>.+)",
    "store": "PUT /storage/(?P<oid>[0-9a-f]{64})",
    "fetch": "GET /storage/(?P<oid>[0-9a-f]{64})",
}


class Refused(Exception):
    """Status, what the Hub says, and its code for that if it has one."""


class Hub(ThreadingHTTPServer):
    """``repos``: by name, the kind, whether it is private, and its commits, each an id and the files. ``default``: the
    visibility of what is made. ``lfs``: ends of the names uploaded by LFS. ``failing``: of part of a path, the status that it gets,
    None to hang up."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos, self.objects, self.failing, self.tokens = {}, {}, {}, set()
        self.default, self.lfs = "public", (".parquet", ".safetensors")
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.storage = f"http://localhost:{self.server_port}/storage"  # to the clients another host, as the Hub's is
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def files(self, name: str) -> dict[str, bytes]:
        return self.repos[name]["commits"][-1][1]

    def commit(self, name: str, files: dict[str, bytes], private: bool = False, kind: str = "datasets") -> str:
        commits = self.repos.setdefault(name, {"kind": kind, "private": private, "commits": []})["commits"]
        for path, content in files.items():
            if path.endswith(self.lfs):
                self.objects[hashlib.sha256(content).hexdigest()] = content
        commits.append((hashlib.sha1(f"{name} {len(commits)}".encode()).hexdigest(), files))
        return commits[-1][0]

    def address(self, name: str) -> str:
        kind = self.repos[name]["kind"]
        return f"{self.endpoint}/{'' if kind == 'models' else f'{kind}/'}{name}"

    def client(self, home, *command, cwd=ROOT, **environment) -> subprocess.CompletedProcess:
        """Python with ``command`` as a user of this Hub has it, ``home`` being their cache; a None unsets a variable."""
        ours = {"HF_ENDPOINT": self.endpoint, "HF_TOKEN": TOKEN, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
        ours |= {"HF_HUB_OFFLINE": None, "HF_UPDATE_DOWNLOAD_COUNTS": "0"} | environment
        both = {name: value for name, value in (os.environ | ours).items() if value is not None}
        command = [sys.executable, *map(str, command)]
        return subprocess.run(command, cwd=cwd, env=both, capture_output=True, text=True, timeout=300)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def handle_any(self):
        url = urlsplit(self.path)
        asked = f"{self.command.replace('HEAD', 'GET')} {unquote(url.path)}"
        self.query, self.sent = parse_qs(url.query), self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            for part, status in self.server.failing.items():
                if part in asked and status is None:
                    self.close_connection = True
                    return None
                if part in asked:
                    raise Refused(status, "the test wants it")
            for method, route in ROUTES.items():
                if match := re.fullmatch(route, asked):
                    return getattr(self, method)(**self.enter(method, **match.groupdict()))
            raise Refused(404, f"no such page: {asked}")
        except Refused as refused:
            status, message, *code = refused.args
            codes = {"X-Error-Code": code[0]} if code else {}
            self.answer({"error": message}, status, **{"X-Error-Message": message} | codes)

    do_GET = do_HEAD = do_POST = do_PUT = handle_any

    def answer(self, body, status=200, **headers):
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)

    def enter(self, method, kind=None, name=None, revision=None, **rest) -> dict:
        """What a method takes, once whoever asks may, and the repository and revision are there."""
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if method in ("store", "fetch") and token:
            raise Refused(400, "a token was sent to the storage, whose addresses are signed")
        self.server.tokens.add(token)
        repo = self.server.repos.get(name)
        if token != TOKEN and (self.command == "POST" or repo and repo["private"]):
            raise Refused(401, "Invalid username or password.")
        if name and (not repo or repo["kind"] != (kind or "models")):
            raise Refused(404, "Repository not found", "RepoNotFound")
        if name:
            self.sha = repo["commits"][-1][0] if revision in (None, "main") else revision
            if self.sha not in dict(repo["commits"]):
                raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
            self.name, self.private, self.files = name, repo["private"], dict(repo["commits"])[self.sha]
        return rest

    def create(self):
        asked = json.loads(self.sent)
        name, kind = f"{asked['organization']}/{asked['name']}", f"{asked.get('type', 'model')}s"
        if kind == "spaces" and asked.get("sdk") != "gradio":
            raise Refused(400, "a Space needs its sdk")
        error = {"error": "You already created this repo"} if name in self.server.repos else {}
        if not error:
            private = asked.get("visibility", self.server.default) == "private"
            self.server.commit(name, {".gitattributes": b"*.parquet filter=lfs\n"}, private, kind)
        self.answer({"url": self.server.address(name)} | error, 409 if error else 200)

    def validate(self):
        self.answer({"errors": [], "warnings": []})

    def preupload(self):
        files = [{"path": file["path"], "shouldIgnore": False} for file in json.loads(self.sent)["files"]]
        for file in files:
            there = self.entry(file["path"])
            file["uploadMode"] = "lfs" if file["path"].endswith(self.server.lfs) else "regular"
            file["oid"] = there.get("lfs", there)["oid"] if file["path"] in self.files else None
        self.answer({"files": files})

    def batch(self):
        asked = json.loads(self.sent)["objects"]
        for one in asked:
            if one["oid"] not in self.server.objects:
                one["actions"] = {"upload": {"href": f"{self.server.storage}/{one['oid']}"}}
        self.answer({"transfer": "basic", "objects": asked})

    def store(self, oid):
        if hashlib.sha256(self.sent).hexdigest() != oid:
            raise Refused(400, "the content has another hash")
        self.server.objects[oid] = self.sent
        self.answer(b"")

    def commit(self):
        files = dict(self.files)
        for line in self.sent.splitlines():
            match json.loads(line):
                case {"key": "file", "value": {"path": path, "content": content}}:
                    files[path] = b64decode(content)
                case {"key": "lfsFile", "value": {"path": path, "oid": oid}}:
                    files[path] = self.server.objects[oid]
                case {"key": "deletedFile", "value": {"path": path}}:
                    if files.pop(path, None) is None:
                        raise Refused(404, "A file with this name doesn't exist", "EntryNotFound")
        sha = self.server.commit(self.name, files)
        self.answer({"commitOid": sha, "commitUrl": f"{self.server.address(self.name)}/commit/{sha}"})

    def info(self):
        siblings = [{"rfilename": path} for path in sorted(self.files)]
        self.answer({"id": self.name, "sha": self.sha, "private": self.private, "siblings": siblings})

    def entry(self, path) -> dict:
        if path not in self.files:
            return {"type": "directory", "path": path, "size": 0, "oid": hashlib.sha1(path.encode()).hexdigest()}
        content = self.files[path]
        size, sha256 = len(content), hashlib.sha256(content).hexdigest()
        oid = hashlib.sha1(b"blob %d\0" % size + content).hexdigest()
        by_lfs = {"lfs": {"oid": sha256, "size": size, "pointerSize": 134}} if path.endswith(self.server.lfs) else {}
        return {"type": "file", "path": path, "size": size, "oid": oid} | by_lfs

    def tree(self, path):
        inside = f"{path}/" if path else ""
        parts = [file.split("/") for file in self.files if file.startswith(inside)]
        found = {"/".join(part[:depth]) for part in parts for depth in range(1, len(part) + 1)}
        found = sorted(item for item in found if item.startswith(inside))
        if not found:
            raise Refused(404, f"{path} does not exist", "EntryNotFound")
        everything = self.query["recursive"] == ["true"]
        self.answer([self.entry(item) for item in found if everything or "/" not in item.removeprefix(inside)])

    def resolve(self, path):
        if path not in self.files:
            raise Refused(404, "Entry not found", "EntryNotFound")
        entry, headers = self.entry(path), {"X-Repo-Commit": self.sha}
        if "lfs" not in entry:
            return self.part(self.files[path], ETag=f'"{entry["oid"]}"', **headers)
        oid = entry["lfs"]["oid"]
        headers |= {"X-Linked-Etag": f'"{oid}"', "X-Linked-Size": entry["size"]}
        self.answer(b"", 302, Location=f"{self.server.storage}/{oid}", **headers)

    def fetch(self, oid):
        self.part(self.server.objects[oid], ETag=f'"{oid}"')

    def part(self, content, **headers):
        """The content, or the bytes of it that are asked for."""
        if asked := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            first, last = int(asked[1]), min(int(asked[2]), len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            return self.answer(content[first : last + 1], 206, **headers)
        self.answer(content, **headers)


@pytest.fixture
def hub():
    """A Hub that ends up without its token in anything that was published."""
    with Hub() as hub:
        yield hub
        hub.shutdown()
    assert not any(TOKEN.encode() in content for _, files in history(hub) for content in files.values())


def history(hub):
    return [commit for repo in hub.repos.values() for commit in repo["commits"]]


def ask(hub, tmp_path, *command, **environment):
    """Run Python code with its arguments as a user does, who is shown neither the token nor a traceback."""
    done = hub.client(tmp_path / "home", "-c", *command, **environment)
    assert TOKEN not in done.stdout + done.stderr and "Traceback" not in done.stderr, done.stderr
    return done


def contents(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def published(hub, name):
    return {path: content for path, content in hub.files(name).items() if path != ".gitattributes"}
