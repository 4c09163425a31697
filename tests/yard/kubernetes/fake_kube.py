"""A stand-in for the API server of a Kubernetes cluster: real HTTP, pods that are processes.

It has no admission, capacity, images, DNS names or second user. It validates every object by the
schemas of Kubernetes and JobSet. Lists have versions; watches resume from one, send bookmarks and
answer 410 for forgotten history. Jobs end by their failure policy. dryRun=All stores nothing."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Coroutine
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

import yaml
from aiohttp import web

from tests.flows.backends.kubernetes_schemas import ValidationError, check
from tests.yard.kubernetes.fake_kube_jobs import Cluster
from tests.yard.kubernetes.fake_kube_pods import Container
from tests.yard.kubernetes.fake_kube_store import Document, Store, matches

TOKEN = "yard-worker"
BOOKMARK_SECONDS = 0.5
NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
KINDS = {"jobs": "Job", "jobsets": "JobSet", "services": "Service", "pods": "Pod"}
KINDS |= {"events": "Event"}
GROUPS = {"jobs": "batch/v1", "jobsets": "jobset.x-k8s.io/v1alpha2"}

T = TypeVar("T")


def status(code: int, reason: str, message: str) -> Document:
    result = "Failure" if code >= 400 else "Success"
    whole = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": result}
    return {**whole, "reason": reason, "message": message, "code": code}


def refuse(code: int, reason: str, message: str) -> web.Response:
    return web.json_response(status(code, reason, message), status=code)


class FakeKube:
    """Runs in a thread of its own; whoever tests calls it from another one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kubeconfig = folder / "kubeconfig"
        self.asked: list[tuple[str, str]] = []
        """Method and path of every request, with `watch` for those that watch."""
        self.has_jobsets = False
        self.denied: set[tuple[str, str]] = set()
        """Method and plural that the account may not."""
        self.post_refusals: dict[str, str] = {}
        """Why objects of a plural are not taken, as a quota or a webhook says it."""
        self.token = TOKEN
        self.is_away = False
        self._streams: set[asyncio.Task[Any]] = set()
        self._deletions: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    # --- from the test ------------------------------------------------------------------------

    def up(self) -> None:
        self._thread.start()
        self.call(self._up())

    def down(self) -> None:
        self.call(self._down())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def renew(self) -> None:
        """No trouble any more, and nothing in it."""
        self.is_away = self.has_jobsets = False
        self.denied.clear()
        self.post_refusals.clear()
        self.cluster.lost.clear()
        self.cluster.quota = ""
        self.cluster.secrets.clear()
        self.call(self._empty())

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run something in the server's thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def all(self, plural: str, namespace: str = "yard") -> list[Document]:
        async def ask() -> list[Document]:
            return deepcopy(self.store.all(plural, namespace))

        return self.call(ask())

    def streams(self) -> int:
        """Connections that watch objects or follow logs now."""

        async def count() -> int:
            return len(self._streams)

        return self.call(count())

    def preempt(self, index: int = 0, reason: str = "PreemptionByScheduler") -> None:
        """Take the node of a running pod."""
        self.call(self.cluster.disrupt(self._pod(index), reason, "preempting to accommodate"))

    def lose_node_of(self, index: int = 0) -> str:
        """Power off the node of a running pod; its name."""
        node = str(self._pod(index)["spec"]["nodeName"])
        self.call(self.cluster.lose(node))
        return node

    def _pod(self, index: int) -> Document:
        pods = [pod for (plural, _, _), pod in self.store.objects.items() if plural == "pods"]
        running = [pod for pod in pods if pod["status"]["phase"] == "Running"]
        name = f"-{index}-"
        return next(pod for pod in running if pod["metadata"]["generateName"].endswith(name))

    def delete_job(self) -> None:
        """As a person with kubectl would."""

        async def delete() -> None:
            (job,) = [one for (kind, _, _), one in self.store.objects.items() if kind == "jobs"]
            await self.cluster.delete("jobs", job, "Background")

        self.call(delete())

    def let_go(self) -> None:
        """What Kueue does when there is room."""

        async def let_go() -> None:
            for (plural, _, _), one in self.store.objects.items():
                if plural == "jobs" and one["spec"].pop("suspend", None):
                    self.store.touch(plural, one)

        self.call(let_go())

    def drop_streams(self, forget: bool = False) -> None:
        """Cut all connections that watch or follow; forget: so that watches must list again."""

        async def drop() -> None:
            if forget:
                self.store.forget()
            for task in list(self._streams):
                task.cancel()

        self.call(drop())

    # --- the server -----------------------------------------------------------------------------

    async def _up(self) -> None:
        self.store = Store()
        self.cluster = Cluster(self.store, self.folder)
        app = web.Application(middlewares=[self._gate])
        add = app.router.add_route
        add("GET", "/version", self._version)
        add("GET", "/apis/{group}/{version}", self._group)
        core, group = "/api/v1/namespaces/{ns}", "/apis/{group}/{version}/namespaces/{ns}"
        add("GET", f"{core}/pods/{{name}}/log", self._log)
        for base in (f"{core}/{{plural}}", f"{group}/{{plural}}"):
            add("POST", base, self._create)
            add("GET", base, self._list)
            add("GET", f"{base}/{{name}}", self._get)
            add("PATCH", f"{base}/{{name}}", self._patch)
            add("DELETE", f"{base}/{{name}}", self._delete)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        self.kubeconfig.write_text(yaml.safe_dump(kubeconfig(port, self.token)))

    async def _down(self) -> None:
        await self._empty()
        await self._runner.cleanup()

    async def _empty(self) -> None:
        for task in (*self._streams, *self._deletions):
            task.cancel()
        await self.cluster.close()
        for (plural, _, _), one in list(self.store.objects.items()):
            self.store.remove(plural, one)

    @web.middleware
    async def _gate(self, request: web.Request, handler: Any) -> web.StreamResponse:
        plural = request.match_info.get("plural", "")
        verb = "watch" if request.query.get("watch") else request.method
        self.asked.append((verb, request.path))
        if self.is_away:
            return web.Response(status=503, text="<html>no upstream</html>")
        if request.headers.get("authorization", "").split()[-1:] != [self.token]:
            return refuse(401, "Unauthorized", "Unauthorized")
        if (request.method, plural) in self.denied:
            text = f'{plural} is forbidden: User "worker" cannot {request.method} {plural}'
            return refuse(403, "Forbidden", text)
        if plural == "jobsets" and not self.has_jobsets:
            return refuse(404, "NotFound", "the server could not find the requested resource")
        response: web.StreamResponse = await handler(request)
        return response

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"major": "1", "minor": "34", "gitVersion": "v1.34.0-fake"})

    async def _group(self, request: web.Request) -> web.Response:
        if request.match_info["group"].startswith("jobset") and not self.has_jobsets:
            return refuse(404, "NotFound", "the server could not find the requested resource")
        return web.json_response({"kind": "APIResourceList", "resources": []})

    async def _create(self, request: web.Request) -> web.Response:
        namespace, plural = request.match_info["ns"], request.match_info["plural"]
        document = await request.json()
        try:
            check(document)
        except ValidationError as error:
            return refuse(422, "Invalid", str(error).splitlines()[0])
        name = document["metadata"]["name"]
        if not NAME.fullmatch(name):
            return refuse(422, "Invalid", f"metadata.name: {name!r} is no RFC 1123 label")
        if plural == "jobsets" and len(_longest_pod(document)) > 63:  # says its webhook
            return refuse(422, "Invalid", f"pods of JobSet {name} would have too long names")
        if namespace != "yard":
            return refuse(404, "NotFound", f'namespaces "{namespace}" not found')
        if self.store.get(plural, namespace, name) is not None:
            return refuse(409, "AlreadyExists", f'{plural} "{name}" already exists')
        if why := self.post_refusals.get(plural):
            return refuse(403, "Forbidden", f'{plural} "{name}" is forbidden: {why}')
        if request.query.get("dryRun") == "All":
            return web.json_response(document, status=201)
        self.store.add(plural, namespace, document)
        self.cluster.begin(plural, document)
        return web.json_response(document, status=201)

    def _named(self, request: web.Request) -> Document:
        info = request.match_info
        found = self.store.get(info["plural"], info["ns"], info["name"])
        if found is None:
            text = json.dumps(status(404, "NotFound", f'"{info["name"]}" not found'))
            raise web.HTTPNotFound(text=text, content_type="application/json")
        return found

    async def _get(self, request: web.Request) -> web.Response:
        return web.json_response(self._named(request))

    async def _patch(self, request: web.Request) -> web.Response:
        found = self._named(request)
        found["metadata"] |= (await request.json())["metadata"]
        self.store.touch(request.match_info["plural"], found)
        return web.json_response(found)

    async def _delete(self, request: web.Request) -> web.Response:
        found, plural = self._named(request), request.match_info["plural"]
        how = request.query.get("propagationPolicy", "Background")
        task = asyncio.ensure_future(self.cluster.delete(plural, found, how))
        self._deletions.add(task)
        task.add_done_callback(self._deletions.discard)
        return web.json_response(status(200, "", "deleted"))

    async def _list(self, request: web.Request) -> web.StreamResponse:
        info, query = request.match_info, request.query
        plural, namespace = info["plural"], info["ns"]
        if query.get("watch") == "true":
            return await self._stream(request, self._watch)
        items = self.store.all(plural, namespace, query.get("labelSelector", ""))
        chosen = query.get("fieldSelector", "").removeprefix("involvedObject.name=")
        if chosen:
            items = [one for one in items if one["involvedObject"]["name"] == chosen]
        meta = {"resourceVersion": str(self.store.version)}
        whole = {"kind": f"{KINDS[plural]}List", "apiVersion": GROUPS.get(plural, "v1")}
        return web.json_response({**whole, "metadata": meta, "items": items})

    # --- streams --------------------------------------------------------------------------------

    async def _stream(self, request: web.Request, write: Any) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        task = asyncio.ensure_future(write(request, response))
        self._streams.add(task)
        try:
            await task
        except asyncio.CancelledError:
            if request.transport is not None:
                request.transport.abort()  # as a load balancer does
        except ConnectionError:
            pass
        finally:
            self._streams.discard(task)
        return response

    async def _watch(self, request: web.Request, response: web.StreamResponse) -> None:
        plural, query = request.match_info["plural"], request.query
        at, ends = int(query["resourceVersion"]), time.monotonic() + int(query["timeoutSeconds"])

        async def send(kind: str, document: Document) -> None:
            await response.write(json.dumps({"type": kind, "object": document}).encode() + b"\n")

        while time.monotonic() < ends:
            if at < self.store.oldest:
                await send("ERROR", status(410, "Expired", "too old resource version"))
                return
            for version, kind, of, document in list(self.store.changes):
                if version > at:
                    at = version
                    if of == plural and matches(document, query.get("labelSelector", "")):
                        await send(kind, document)
            try:
                async with asyncio.timeout(BOOKMARK_SECONDS), self.store.news:
                    await self.store.news.wait()
            except TimeoutError:
                empty = {"kind": KINDS[plural], "apiVersion": GROUPS.get(plural, "v1")}
                await send("BOOKMARK", {**empty, "metadata": {"resourceVersion": str(at)}})

    async def _log(self, request: web.Request) -> web.StreamResponse:
        pod = self.store.get("pods", request.match_info["ns"], request.match_info["name"])
        if pod is None:
            return refuse(404, "NotFound", "pods not found")
        if pod["spec"].get("nodeName") in self.cluster.lost:
            return refuse(500, "InternalError", "dial tcp 10.0.0.7:10250: i/o timeout")
        if request.match_info["name"] not in self.cluster.containers:
            return refuse(400, "BadRequest", "container is waiting to start")
        return await self._stream(request, self._follow)

    async def _follow(self, request: web.Request, response: web.StreamResponse) -> None:
        container: Container = self.cluster.containers[request.match_info["name"]]
        since = request.query.get("sinceTime", "")
        begin = _seconds(since) * 10**9 if since else 0
        sent = 0
        while True:
            lines, is_read = list(container.lines[sent:]), container.is_read
            for at, line in lines:
                sent += 1
                if at >= begin:
                    await response.write(_stamp(at) + b" " + line + b"\n")
            if is_read and sent == len(container.lines):
                return
            async with container.news:
                if len(container.lines) == sent and not container.is_read:
                    await container.news.wait()


def _longest_pod(jobset: Document) -> str:
    """The longest name that a pod of a JobSet of one kind of Job can have."""
    (replicated,) = jobset["spec"]["replicatedJobs"]
    last = replicated["template"]["spec"]["completions"] - 1
    job = f"{jobset['metadata']['name']}-{replicated['name']}-{replicated.get('replicas', 1) - 1}"
    return f"{job}-{last}-abcde"


def _seconds(stamp: str) -> int:
    import calendar

    return calendar.timegm(time.strptime(stamp, "%Y-%m-%dT%H:%M:%SZ"))


def _stamp(at: int) -> bytes:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at // 10**9))
    return f"{whole}.{at % 10**9:09d}Z".encode()


def kubeconfig(port: int, token: str) -> Document:
    cluster = {"name": "fake", "cluster": {"server": f"http://127.0.0.1:{port}"}}
    context = {"cluster": "fake", "user": "fake", "namespace": "yard"}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "fake",
        "clusters": [cluster],
        "contexts": [{"name": "fake", "context": context}],
        "users": [{"name": "fake", "user": {"token": token}}],
    }
