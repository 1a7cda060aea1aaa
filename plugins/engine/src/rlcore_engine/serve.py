"""``rlcore serve``: a model behind HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["serve"]


def serve(
    model: Annotated[Path, typer.Argument(help="folder of a causal model in Hugging Face format")],
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port; 0 takes a free one", min=0, max=65535)] = 30000,
    name: Annotated[str | None, typer.Option(help="name of the model; default: that of its folder")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16")] = "auto",
    side: Annotated[str, typer.Option(help="auto, llama or transformers")] = "auto",
    slots: Annotated[int, typer.Option(help="requests that decode together", min=1)] = 32,
    context_length: Annotated[int | None, typer.Option(help="tokens of a sequence", min=2)] = None,
    threads: Annotated[int | None, typer.Option(help="threads of torch", min=1)] = None,
    seed: Annotated[int, typer.Option(help="seed of requests that bring none")] = 0,
    key_env: Annotated[
        str | None, typer.Option(help="environment variable with the key that clients must send")
    ] = None,
    key_file: Annotated[str | None, typer.Option(help="file with that key")] = None,
) -> None:
    """Serve a model until it is interrupted. Prints its URL when it is ready.

    Everybody who reaches the port may replace the weights: without a key it listens on this machine alone.
    """
    import asyncio

    from pydantic import ValidationError
    from rlcore.config import Secret
    from rlcore.errors import ConfigError

    from rlcore_engine.engine import EmbeddedEngine
    from rlcore_engine.http.app import LOOPBACK, listen

    key = Secret(env=key_env, file=key_file).read() if key_env or key_file else None
    if key is None and host not in LOOPBACK:
        raise ConfigError(f"--host {host} lets others replace the weights: give --key-env or --key-file")
    options = {"dtype": dtype, "side": side, "slots": slots, "context_length": context_length, "threads": threads}
    try:
        config = EmbeddedEngine.Config(**options)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"--{first['loc'][0]}: {first['msg']}") from error
    sock = listen(host, port)
    with sock:
        asyncio.run(_serve(EmbeddedEngine(config), model, name or model.resolve().name, sock, seed, key))


async def _serve(engine: Any, model: Path, name: str, sock: Any, seed: int, key: str | None) -> None:
    from rlcore.types import RunContext

    from rlcore_engine.http.app import create_app, server, url_of

    await engine.start(RunContext("serve", Path(), seed, {"path": str(model)}))
    try:
        http = server(create_app(engine, name=name, key=key))
        print(f"serving {name} on {url_of(sock)}", flush=True)
        await http.serve(sockets=[sock])
    finally:
        await engine.aclose()
