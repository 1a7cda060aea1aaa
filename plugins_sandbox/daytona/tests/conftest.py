"""A server that speaks as much of Daytona's protocol as the backend uses; a command really runs, in a local sandbox.

It runs in a thread of its own, so that it is there for any number of event loops and processes. ``server.faults`` holds what
is to go wrong next, by route.
"""

import asyncio
import itertools
import json
import threading
import time
from datetime import UTC, datetime

import pytest
from aiohttp import web
from rlcore.errors import SandboxLost
from rlcore.types import SandboxSpec
from rlcore_local.backend import LocalBackend

PAGE = 7


class Server:
    """The provider: sandboxes by id, a quota, and faults that are used up one by one."""

    def __init__(self, state_dir):
        self.local = LocalBackend(LocalBackend.Config(state_dir=state_dir, ignore_image=True, memory_mb=512))
        self.boxes, self.records, self.waiting = {}, {}, {}
        self.log, self.deleted = [], []
        self.faults = {"create": [], "execute": [], "delete": [], "start": []}
        self.cpu_quota, self.create_seconds = None, 0.0
        self.numbers = itertools.count(1)

    def app(self):
        app = web.Application(client_max_size=1 << 30)
        one, toolbox = "/api/sandbox/{id}", "/toolbox/{id}"
        app.add_routes(
            [
                web.post("/api/sandbox", self.create),
                web.get("/api/sandbox", self.list),
                web.get(one, self.get),
                web.delete(one, self.delete),
                web.post(toolbox + "/process/execute", self.execute),
                web.post(toolbox + "/files/bulk-upload", self.upload),
                web.post(toolbox + "/files/bulk-download", self.download),
            ]
        )
        return app

    def fault(self, route):
        return self.faults[route].pop(0) if self.faults[route] else None

    async def create(self, request):
        body = await request.json()
        if request.headers.get("Authorization") != "Bearer good-key":
            return refuse(401, "Unauthorized")
        self.log.append(body)
        fault = self.fault("create")
        if isinstance(fault, tuple):
            return refuse(*fault)
        if fault == "drop before":
            request.transport.abort()
            return web.Response()
        cpu = body.get("cpu") or 1
        if self.cpu_quota is not None and cpu + sum(r["cpu"] for r in self.records.values()) > self.cpu_quota:
            return refuse(400, f"Total CPU limit exceeded. Maximum allowed: {self.cpu_quota}.")
        name = f"box-{next(self.numbers)}"
        self.records[name] = {
            "id": name,
            "name": name,
            "organizationId": "org",
            "user": "agent",
            "env": {},
            "public": False,
            "labels": body.get("labels") or {},
            "networkBlockAll": bool(body.get("networkBlockAll")),
            "kvm": False,
            "target": "here",
            "cpu": cpu,
            "gpu": 0,
            "memory": body.get("memory") or 1,
            "disk": body.get("disk") or 3,
            "autoStopInterval": body.get("autoStopInterval"),
            "autoDeleteInterval": body.get("autoDeleteInterval"),
            "state": "creating",
            "createdAt": datetime.now(UTC).isoformat(),
            "runnerId": "r",
            "toolboxProxyUrl": f"http://{request.host}/toolbox",
        }
        self.waiting[name] = asyncio.ensure_future(self.come_up(name, body))
        if fault == "drop after":
            request.transport.abort()
        elif not self.create_seconds:
            await self.waiting[name]
        return web.json_response(self.records[name])

    async def come_up(self, name, body):
        await asyncio.sleep(self.create_seconds)
        record = self.records[name]
        if self.fault("start") == "error":
            record.update(state="error", errorReason="the runner failed")
            return
        memory = (body.get("memory") or 1) * 1024
        spec = SandboxSpec(memory_mb=min(memory, 512), disk_mb=64, network=not record["networkBlockAll"])
        self.boxes[name] = await self.local.start(spec)
        if name in self.records:
            record["state"] = "started"
        else:
            await self.boxes.pop(name).close()

    async def list(self, request):
        wanted = json.loads(request.query.get("labels", "{}"))
        found = [r for r in self.records.values() if wanted.items() <= r["labels"].items()]
        start = int(request.query.get("cursor") or 0)
        more = start + PAGE < len(found)
        return web.json_response(
            {
                "items": found[start : start + PAGE],
                "nextCursor": str(start + PAGE) if more else None,
                "total": len(found),
            }
        )

    async def get(self, request):
        record = self.records.get(request.match_info["id"])
        return web.json_response(record) if record else refuse(404, "Sandbox not found")

    async def delete(self, request):
        name = request.match_info["id"]
        fault = self.fault("delete")
        if isinstance(fault, tuple):
            return refuse(*fault)
        record = self.records.pop(name, None)
        if record is None:
            return refuse(404, "Sandbox not found")
        self.deleted.append(name)
        box = self.boxes.pop(name, None)
        if box is not None:
            await box.close()
        if fault == "drop after":
            request.transport.abort()
        return web.json_response({**record, "state": "destroyed"})

    async def execute(self, request):
        body = await request.json()
        fault = self.fault("execute")
        if fault == "drop before":
            request.transport.abort()
            return web.Response()
        box = self.boxes.get(request.match_info["id"])
        if box is None:
            return refuse(404, "Sandbox not found")
        try:
            result = await box.exec(
                body["command"],
                timeout=body.get("timeout") or 60,
                cwd=body.get("cwd"),
                env=body.get("envs"),
                max_output=1 << 24,
            )
        except SandboxLost:
            return refuse(404, "Sandbox not found")
        if fault == "drop after":
            request.transport.abort()
        if result.timed_out:
            return refuse(408, "command execution timeout")
        return web.json_response({"exitCode": result.exit_code, "result": result.stdout + result.stderr})

    async def upload(self, request):
        box = self.boxes.get(request.match_info["id"])
        if box is None:
            return refuse(404, "Sandbox not found")
        async for part in await request.multipart():
            if part.name.endswith(".path"):
                path = await part.text()
            else:
                await box.write_file(path, bytes(await part.read()))
        return web.Response()

    async def download(self, request):
        box = self.boxes.get(request.match_info["id"])
        if box is None:
            return refuse(404, "Sandbox not found")
        out = b""
        for path in (await request.json())["paths"]:
            data = await box.read_file(path, max_bytes=1 << 28)
            head = f'Content-Disposition: form-data; name="file"; filename="{path}"\r\nContent-Type: application/octet-stream'
            out += b"--cut\r\n" + head.encode() + b"\r\n\r\n" + data + b"\r\n"
        return web.Response(body=out + b"--cut--\r\n", headers={"Content-Type": "multipart/form-data; boundary=cut"})


def refuse(status, text, headers=None):
    body = {"statusCode": status, "message": text, "error": "refused"}
    return web.json_response(body, status=status, headers=headers or {})


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The provider in a thread; the SDK finds it by its own variables."""
    one = Server(str(tmp_path / "provider"))
    ready, loop = threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve():
        runner = web.AppRunner(one.app(), access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        one.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/api"
        ready.set()
        await stop.wait()
        for task in one.waiting.values():
            task.cancel()
        await asyncio.gather(*one.waiting.values(), return_exceptions=True)
        await one.local.aclose()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    ready.wait(10)
    monkeypatch.setenv("DAYTONA_API_URL", one.url)
    monkeypatch.setenv("DAYTONA_API_KEY", "good-key")
    yield one
    loop.call_soon_threadsafe(stop.set)
    thread.join(30)
    loop.close()


@pytest.fixture
def make_backend(server):
    from rlcore_daytona.backend import DaytonaBackend

    return lambda **options: DaytonaBackend(DaytonaBackend.Config(**{"image": "debian:12", **options}))


@pytest.fixture
async def backend(make_backend):
    one = make_backend()
    yield one
    await one.aclose()


@pytest.fixture
def settled():
    """Wait until a condition holds, for what goes on in other threads."""

    async def wait(condition, seconds=8.0):
        end = time.monotonic() + seconds
        while not condition() and time.monotonic() < end:
            await asyncio.sleep(0.05)
        assert condition()

    return wait
