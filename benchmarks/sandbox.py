"""What a sandbox costs: create, command, upload, close, and sixteen at once, beside the plain clients in the same run.

    python benchmarks/sandbox.py                      local against subprocess
    DOCKER_HOST=… python benchmarks/sandbox.py --docker IMAGE     and Docker against docker-py

Medians in milliseconds. The lease's own cost is measured on a backend that does nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from rlcore.rollout.lease import SandboxLease
from rlcore.types import SandboxSpec

ROUNDS = 50


class Timer:
    """Collects durations by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    async def measure(self, name: str, work: Any) -> Any:
        begun = time.perf_counter()
        result = await work
        self.seconds.setdefault(name, []).append(time.perf_counter() - begun)
        return result

    def table(self) -> dict[str, float]:
        return {name: round(1000 * statistics.median(values), 3) for name, values in self.seconds.items()}


class Nothing:
    """A backend that costs nothing, so that what remains is the lease."""

    class Box:
        id = "box"

        async def close(self) -> None:
            pass

    async def start(self, spec: SandboxSpec) -> Any:
        return self.Box()

    async def aclose(self) -> None:
        pass


def fill(folder: Path) -> None:
    for number in range(10):
        (folder / f"{number}").write_bytes(os.urandom(10_000))


async def backend_costs(make: Any, spec: SandboxSpec, creates: int) -> dict[str, float]:
    timer = Timer()
    backend = make()
    with tempfile.TemporaryDirectory() as folder:
        fill(Path(folder))
        await (await backend.start(spec)).close()
        for _ in range(creates):
            box = await timer.measure("create", backend.start(spec))
            await box.exec("true", timeout=20)
            await timer.measure("upload 100 KB", box.upload_dir(Path(folder), "/workspace/up"))
            for _ in range(ROUNDS // creates):
                await timer.measure("exec", box.exec("true", timeout=20))
            await timer.measure("close", box.close())

    async def life() -> None:
        box = await backend.start(spec)
        await box.exec("true", timeout=60)
        await box.close()

    await timer.measure("16 at once, in all", asyncio.gather(*(life() for _ in range(16))))
    await backend.aclose()
    return timer.table()


async def plain_subprocess() -> dict[str, float]:
    timer = Timer()
    for _ in range(ROUNDS):
        await timer.measure("exec", asyncio.to_thread(subprocess.run, ["sh", "-c", "true"], check=True))
    return timer.table()


async def plain_docker(image: str) -> dict[str, float]:
    import docker

    timer = Timer()
    client = docker.from_env()
    for _ in range(5):
        run = lambda: client.containers.run(image, ["sleep", "600"], entrypoint=[], detach=True, network_mode="none")  # noqa: E731
        container = await timer.measure("create", asyncio.to_thread(run))
        for _ in range(ROUNDS // 5):
            await timer.measure("exec", asyncio.to_thread(container.exec_run, ["sh", "-c", "true"], demux=True))
        await timer.measure("close", asyncio.to_thread(container.remove, force=True))
    client.close()
    return timer.table()


async def lease_cost() -> float:
    costs = []
    with tempfile.TemporaryDirectory() as folder:
        lease = SandboxLease(Nothing(), backend_name="nothing", ledger_path=Path(folder, "l.jsonl"), run_id="r")  # type: ignore[arg-type]
        for _ in range(200):
            begun = time.perf_counter()
            async with lease.sandbox(SandboxSpec(), task_id="t"):
                pass
            costs.append(time.perf_counter() - begun)
        await lease.aclose()
    return round(1000 * statistics.median(costs), 3)


async def main(docker_image: str | None) -> dict[str, Any]:
    from rlcore_local.backend import LocalBackend

    results: dict[str, Any] = {"lease, per sandbox": await lease_cost()}
    results["subprocess"] = await plain_subprocess()
    results["local"] = await backend_costs(lambda: LocalBackend(LocalBackend.Config()), SandboxSpec(), 10)
    if docker_image is not None:
        from rlcore_docker.backend import DockerBackend

        results["docker-py"] = await plain_docker(docker_image)
        results["docker"] = await backend_costs(
            lambda: DockerBackend(DockerBackend.Config(image=docker_image)), SandboxSpec(), 5
        )
        results["docker exec, times faster"] = round(results["docker-py"]["exec"] / results["docker"]["exec"], 1)
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docker", metavar="IMAGE", help="measure Docker too, with this image")
    print(json.dumps(asyncio.run(main(parser.parse_args().docker)), indent=2))
