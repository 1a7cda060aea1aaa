# ruff: noqa: N802 - the names of the protocol
"""A server that speaks as much of Modal's protocol as the backend uses; a command really runs, in a local sandbox.

Control plane and command router share one port, in a thread of their own. ``server.faults`` holds what is to go wrong next.
"""

import asyncio
import itertools
import threading
import time

import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from grpclib.server import Server as GrpcServer
from modal_proto import api_pb2, task_command_router_pb2
from modal_proto.api_grpc import ModalClientBase
from modal_proto.task_command_router_grpc import TaskCommandRouterBase
from rlcore.errors import SandboxLost
from rlcore.types import SandboxSpec
from rlcore_local.backend import LocalBackend

PAGE = 7
ENDED = api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_TERMINATED)


class Provider(ModalClientBase):
    """The control plane: sandboxes by id, and faults that are used up one by one."""

    def __init__(self, state_dir):
        self.local = LocalBackend(LocalBackend.Config(state_dir=state_dir, ignore_image=True, disk_mb=64))
        self.boxes, self.infos, self.keys, self.creates, self.deleted = {}, {}, {}, [], []
        self.faults = {"create": [], "exec": [], "terminate": []}
        self.create_seconds = 0.0
        self.numbers = itertools.count(1)

    def fault(self, route):
        fault = self.faults[route].pop(0) if self.faults[route] else None
        if isinstance(fault, tuple):
            raise GRPCError(*fault)
        return fault

    async def ClientHello(self, stream):
        await stream.recv_message()
        await stream.send_message(api_pb2.ClientHelloResponse(image_builder_version="2025.06"))

    async def AuthTokenGet(self, stream):
        await stream.recv_message()
        if stream.metadata.get("x-modal-token-id") != "ak-good":
            raise GRPCError(Status.UNAUTHENTICATED, "Token missing or wrong")
        await stream.send_message(api_pb2.AuthTokenGetResponse(token="e30.eyJleHAiOjk5OTk5OTk5OTl9.e30"))

    async def AppGetOrCreate(self, stream):
        await stream.recv_message()
        if stream.metadata.get("x-modal-token-id") != "ak-good":
            raise GRPCError(Status.UNAUTHENTICATED, "Token missing or wrong")
        await stream.send_message(api_pb2.AppGetOrCreateResponse(app_id="ap-1"))

    async def EnvironmentGetOrCreate(self, stream):
        await stream.recv_message()
        settings = api_pb2.EnvironmentSettings(image_builder_version="2025.06")
        metadata = api_pb2.EnvironmentMetadata(name="main", settings=settings)
        await stream.send_message(api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=metadata))

    async def ImageGetOrCreate(self, stream):
        request = await stream.recv_message()
        text = "\n".join(request.image.dockerfile_commands)
        done = api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_SUCCESS)
        if "broken" in text:
            failed = api_pb2.GenericResult.GENERIC_STATUS_FAILURE
            done = api_pb2.GenericResult(status=failed, exception="the image does not build")
        await stream.send_message(api_pb2.ImageGetOrCreateResponse(image_id="im-1", result=done))

    async def ImageJoinStreaming(self, stream):
        await stream.recv_message()
        done = api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_SUCCESS)
        await stream.send_message(api_pb2.ImageJoinStreamingResponse(result=done, eof=True))

    async def SandboxCreateV2(self, stream):
        request = await stream.recv_message()
        fault = self.fault("create")
        key = stream.metadata.get("x-idempotency-key")
        if key in self.keys:  # the SDK asks again with the same key
            if fault == "lost answer":
                raise GRPCError(Status.INTERNAL, "the answer was lost")
            name = self.keys[key]
            await stream.send_message(api_pb2.SandboxCreateV2Response(sandbox_id=name, task_id=f"ta-{name}"))
            return
        name = self.keys[key] = f"sb-{next(self.numbers)}"
        self.creates.append(request)
        created = time.time()
        memory = request.definition.resources.memory_mb_max or 512
        network = request.definition.network_access.network_access_type != api_pb2.NetworkAccess.BLOCKED
        await asyncio.sleep(self.create_seconds)
        self.boxes[name] = await self.local.start(SandboxSpec(memory_mb=memory, network=network))
        self.infos[name] = api_pb2.SandboxInfo(id=name, created_at=created, app_id=request.app_id, tags=request.tags)
        if fault == "lost answer":
            raise GRPCError(Status.INTERNAL, "the answer was lost")
        await stream.send_message(api_pb2.SandboxCreateV2Response(sandbox_id=name, task_id=f"ta-{name}"))

    async def SandboxGetTaskIdV2(self, stream):
        request = await stream.recv_message()
        await stream.send_message(api_pb2.SandboxGetTaskIdResponse(task_id=f"ta-{request.sandbox_id}"))

    async def SandboxGetCommandRouterAccess(self, stream):
        request = await stream.recv_message()
        if request.sandbox_id and request.sandbox_id not in self.boxes:
            raise GRPCError(Status.NOT_FOUND, "no such sandbox")
        jwt = "e30.eyJleHAiOjk5OTk5OTk5OTl9.e30"
        await stream.send_message(api_pb2.SandboxGetCommandRouterAccessResponse(url=self.url, jwt=jwt))

    async def SandboxWaitV2(self, stream):
        request = await stream.recv_message()
        end = time.monotonic() + request.timeout
        while request.sandbox_id in self.boxes and time.monotonic() < end:
            await asyncio.sleep(0.05)
        if request.sandbox_id not in self.infos and not request.sandbox_id.startswith("sb-"):
            raise GRPCError(Status.NOT_FOUND, "no such sandbox")
        gone = request.sandbox_id not in self.boxes
        await stream.send_message(api_pb2.SandboxWaitResponse(result=ENDED if gone else None))

    async def SandboxListV2(self, stream):
        request = await stream.recv_message()
        wanted = {(tag.tag_name, tag.tag_value) for tag in request.tags}
        found = [
            info
            for info in sorted(self.infos.values(), key=lambda info: -info.created_at)
            if wanted <= {(tag.tag_name, tag.tag_value) for tag in info.tags}
            and (not request.before_timestamp or info.created_at < request.before_timestamp)
        ]
        await stream.send_message(api_pb2.SandboxListResponse(sandboxes=found[:PAGE]))

    async def SandboxTerminateV2(self, stream):
        request = await stream.recv_message()
        fault = self.fault("terminate")
        box = self.boxes.pop(request.sandbox_id, None)
        if box is None:
            raise GRPCError(Status.NOT_FOUND, "no such sandbox")
        self.infos.pop(request.sandbox_id)
        self.deleted.append(request.sandbox_id)
        await box.close()
        if fault == "lost answer":
            raise GRPCError(Status.INTERNAL, "the answer was lost")
        await stream.send_message(api_pb2.SandboxTerminateResponse())


class Router(TaskCommandRouterBase):
    """The command router: a command begins when its output is asked for, with the stdin that came until then."""

    def __init__(self, provider):
        self.provider = provider
        self.execs, self.stdin, self.runs = {}, {}, {}

    async def TaskExecStart(self, stream):
        request = await stream.recv_message()
        if request.task_id.removeprefix("ta-") not in self.provider.boxes:
            raise GRPCError(Status.NOT_FOUND, "no such task")
        self.provider.fault("exec")
        self.execs[request.exec_id] = request
        await stream.send_message(task_command_router_pb2.TaskExecStartResponse())

    async def TaskExecStdinWrite(self, stream):
        request = await stream.recv_message()
        data = self.stdin.setdefault(request.exec_id, bytearray())
        data[request.offset :] = request.data
        await stream.send_message(task_command_router_pb2.TaskExecStdinWriteResponse())

    async def result(self, exec_id):
        if exec_id not in self.runs:
            run = self.runs[exec_id] = asyncio.ensure_future(self.run(self.execs[exec_id]))
            run.add_done_callback(lambda done: done.cancelled() or done.exception())  # the caller may be gone
        try:
            return await asyncio.shield(self.runs[exec_id])
        except SandboxLost:
            raise GRPCError(Status.NOT_FOUND, "the task is gone") from None

    async def run(self, request):
        box = self.provider.boxes.get(request.task_id.removeprefix("ta-"))
        if box is None:
            raise SandboxLost("gone")
        argv = list(request.command_args)
        if request.exec_id in self.stdin:
            path = f"/var/tmp/.stdin-{request.exec_id}"
            await box.write_file(path, bytes(self.stdin.pop(request.exec_id)))
            argv = ["sh", "-c", f'"$@" < {path}; r=$?; rm -f {path}; exit $r', "sh", *argv]
        return await box.exec(argv, timeout=request.timeout_secs or 600, max_output=1 << 26)

    async def TaskExecStdioRead(self, stream):
        request = await stream.recv_message()
        result = await self.result(request.exec_id)
        err = request.file_descriptor == task_command_router_pb2.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDERR
        # the commands of the backend speak ASCII on both, but for the content of files: see `cat`
        data = (result.stderr if err else result.stdout).encode("utf-8", "replace")
        if list(self.execs[request.exec_id].command_args)[:1] == ["cat"] and not err:
            box = self.provider.boxes[request.task_id.removeprefix("ta-")]
            data = await box.read_file(self.execs[request.exec_id].command_args[1], max_bytes=1 << 28)
        for start in range(request.offset, len(data), 1 << 20):
            await stream.send_message(
                task_command_router_pb2.TaskExecStdioReadResponse(data=data[start : start + (1 << 20)])
            )

    async def TaskExecWait(self, stream):
        request = await stream.recv_message()
        result = await self.result(request.exec_id)
        await stream.send_message(task_command_router_pb2.TaskExecWaitResponse(code=max(result.exit_code, 0)))


def complete(base):
    """Routes that this server does not know answer UNIMPLEMENTED."""

    async def unknown(self, stream):
        raise GRPCError(Status.UNIMPLEMENTED, "not spoken here")

    names = list(base.__abstractmethods__)
    return type(base.__name__, (base,), dict.fromkeys(names, unknown)) if names else base


@pytest.fixture(scope="session")
def provider(tmp_path_factory):
    """The provider in a thread; one for the session, because the SDK keeps one client for the process."""
    one = complete(Provider)(str(tmp_path_factory.mktemp("provider") / "state"))
    ready, loop = threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve():
        server = GrpcServer([one, complete(Router)(one)])
        await server.start("127.0.0.1", 0)
        one.url = f"http://127.0.0.1:{server._server.sockets[0].getsockname()[1]}"
        ready.set()
        await stop.wait()
        await one.local.aclose()
        server.close()
        await server.wait_closed()
        await asyncio.sleep(0.1)  # the connections see their end

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    ready.wait(10)
    patch = pytest.MonkeyPatch()
    patch.setenv("MODAL_SERVER_URL", one.url)
    patch.setenv("MODAL_TOKEN_ID", "ak-good")
    patch.setenv("MODAL_TOKEN_SECRET", "as-good")
    patch.setenv("MODAL_CONFIG_PATH", "/nonexistent")
    yield one
    patch.undo()
    loop.call_soon_threadsafe(stop.set)
    thread.join(30)
    loop.close()


@pytest.fixture
def server(provider):
    """The provider without the traces of another test."""
    provider.creates.clear()
    provider.deleted.clear()
    provider.create_seconds = 0.0
    yield provider
    assert not any(provider.faults.values()), "a fault was not met"


@pytest.fixture
def make_backend(server):
    from rlcore_modal.backend import ModalBackend

    return lambda **options: ModalBackend(ModalBackend.Config(**options))


@pytest.fixture
async def backend(make_backend):
    one = make_backend()
    yield one
    await one.aclose()
