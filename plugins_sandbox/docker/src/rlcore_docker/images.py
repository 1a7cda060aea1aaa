"""Images: by name, or built from a task's folder and kept under the hash of its content."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import Any

from rlcore.errors import ConfigError, InfraError, Throttled

__all__ = ["content_hash", "image_for"]


def content_hash(folder: Path) -> str:
    """The same for the same names, modes and contents, whatever the times and the place."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        digest.update(f"{path.relative_to(folder)}\0{status.st_mode & 0o777777:o}\0".encode("utf-8", "surrogateescape"))
        if stat.S_ISLNK(status.st_mode):
            digest.update(os.fsencode(os.readlink(path)))
        elif stat.S_ISREG(status.st_mode):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def image_for(client: Any, image: str | None, build_context: str | None, build_network: str) -> str:
    """The image of a spec, there when this returns: pulled or built if need be. Blocks; runs in a thread.

    Raises ``ConfigError`` for a Dockerfile that does not build and an image that does not exist, ``Throttled`` where the
    registry says so, ``InfraError`` for a registry that does not answer.
    """
    from docker.errors import ImageNotFound

    if build_context is not None and image is None:
        return _built(client, Path(build_context), build_network)
    assert image is not None
    try:
        client.images.get(image)
    except ImageNotFound:
        _pull(client, image)
    return image


def _built(client: Any, folder: Path, network: str) -> str:
    from docker.errors import APIError, BuildError, ImageNotFound

    if not (folder / "Dockerfile").is_file():
        raise ConfigError(f"{folder / 'Dockerfile'} is not there: a task without an image needs one")
    tag = f"rlcore-task:{content_hash(folder)[:24]}"
    try:
        client.images.get(tag)
    except ImageNotFound:
        try:
            client.images.build(path=str(folder), tag=tag, rm=True, forcerm=True, network_mode=network)
        except BuildError as error:
            said = "".join(str(line.get("stream") or line.get("error") or "") for line in error.build_log)
            raise ConfigError(f"{folder / 'Dockerfile'} does not build: {error.msg}\n{said[-1000:].strip()}") from None
        except APIError as error:
            raise ConfigError(f"{folder / 'Dockerfile'} does not build: {error.explanation or error}") from None
    return tag


def _pull(client: Any, image: str) -> None:
    from docker.errors import APIError, NotFound

    try:
        client.images.pull(image) if "@" in image or ":" in image.rpartition("/")[2] else client.images.pull(
            image, "latest"
        )
    except NotFound:
        raise ConfigError(f"the image {image!r} is not here and no registry has it: check its name") from None
    except APIError as error:
        text = str(error.explanation or error)
        if "toomanyrequests" in text or "rate limit" in text.lower():
            raise Throttled(f"the registry refused {image!r} for now: {text}") from None
        raise InfraError(f"the image {image!r} is not here and could not be pulled: {text}") from None
