"""Calls that end in the moment in which their caller goes."""

import asyncio
import gc

import pytest
from rlcore.errors import PolicyUnavailable
from rlcore_policies._calls import Calls

pytestmark = pytest.mark.anyio


async def test_a_call_that_fails_as_its_caller_is_cancelled_prints_no_traceback():
    """An evaluation that gives up cancels its attempts, and some of them fail in the same moment."""

    async def fail():
        raise PolicyUnavailable("status 404")

    async def nothing(request_id, task):
        pass

    heard = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: heard.append(context["message"]))
    caller = asyncio.create_task(Calls(nothing).run("a", fail(), 5.0))
    await asyncio.sleep(0)  # the caller waits
    await asyncio.sleep(0)  # its call has failed
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    del caller
    gc.collect()
    await asyncio.sleep(0)
    assert heard == []
