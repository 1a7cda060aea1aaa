"""The local backend of rlcore, with a note of every command in a file: one plugin built on another."""

import json
import time
from pathlib import Path

from pydantic import Field
from rlcore_local.backend import LocalBackend


class NotingBackend:
    """Passes everything on to the local backend."""

    class Config(LocalBackend.Config):
        notes: str = Field("commands.jsonl", description="the file that the notes are appended to")

    def __init__(self, config: Config):
        self._notes = Path(config.notes)
        self._local = LocalBackend(LocalBackend.Config(**config.model_dump(exclude={"notes"})))

    async def start(self, spec):
        return NotingSandbox(await self._local.start(spec), self._notes)

    async def list(self, labels):
        return await self._local.list(labels)

    async def delete(self, sandbox_id):
        await self._local.delete(sandbox_id)

    async def aclose(self):
        await self._local.aclose()


class NotingSandbox:
    """A sandbox whose commands are noted."""

    def __init__(self, sandbox, notes):
        self._sandbox = sandbox
        self._notes = notes
        self.id = sandbox.id

    async def exec(self, command, **options):
        began = time.monotonic()
        result = await self._sandbox.exec(command, **options)
        note = {"sandbox": self.id, "command": command, "exit": result.exit_code, "seconds": time.monotonic() - began}
        with self._notes.open("a", encoding="utf-8") as file:
            file.write(json.dumps(note) + "\n")
        return result

    def __getattr__(self, name):
        return getattr(self._sandbox, name)
