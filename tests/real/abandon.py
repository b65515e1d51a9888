"""One process with vLLM's ``AsyncLLM``: clients that hang up, and what is left.

Started by the test with a JSON object in argv: ``model``, ``extra`` (akv's settings,
or null for vLLM without akv), ``prompts`` (token ids), ``abandoned`` (for each prompt
the number of streamed tokens after which its client goes away, or null). Prints one
line of JSON: the words of those who stayed, and the engine's holdings before and after.

What is held is counted in the engine's process and in its worker's: blocks of the pool
that are not free, tasks on akv's loops, calls in its threads, threads and descriptors
of the process, and what akv's two roles count themselves.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

# vLLM passes functions to the engine's process only where pickle is allowed.
os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"

_TOKENS = 10
_AT_ONCE = 24


def holdings(worker: Any) -> dict[str, int]:
    """What the process in which this is called holds, with nothing running."""
    del worker
    import asyncio
    import gc
    from pathlib import Path

    # vLLM hides what its start made from the collector, and so from this search.
    gc.unfreeze()
    gc.collect()
    held = {
        "threads": len([*Path("/proc/self/task").iterdir()]),
        "descriptors": len([*Path("/proc/self/fd").iterdir()]),
    }

    async def count(session: Any) -> tuple[Any, int]:
        return await session.statistics(), len(asyncio.all_tasks())

    for found in gc.get_objects():
        kind = type(found).__name__
        if kind == "BlockPool":
            # One block stands for no block and is never free.
            free = found.get_num_free_blocks()
            held["blocks not free"] = found.num_gpu_blocks - 1 - free
        elif kind in {"SchedulerSide", "WorkerSide"}:
            held |= dict(found.debug_state())
            numbers, held["tasks"] = found._portal.call(count, timeout=10)
            for name, calls in numbers.pools.items():
                held[f"{name} calls"] = calls.running + calls.queued
                # Started when they are first needed; their number is fixed.
                held["threads"] -= calls.threads
    return held


class Executor(MultiprocExecutor):  # type: ignore[misc]
    """vLLM's own, which also answers for the process that it lives in, the engine's."""

    def collective_rpc(self, method: Any, *args: Any, **options: Any) -> Any:
        if method == "engine_holdings":
            return [holdings(None)]
        return super().collective_rpc(method, *args, **options)


async def all_holdings(llm: Any) -> dict[str, int]:
    """What the engine's process and its worker's hold."""
    (engine,) = await llm.collective_rpc("engine_holdings")
    (worker,) = await llm.collective_rpc(holdings)
    return {f"engine {name}": value for name, value in engine.items()} | {
        f"worker {name}": value for name, value in worker.items()
    }


async def stream(llm: Any, name: str, prompt: list[int], leaves: int | None) -> str:
    """One client; it goes away after ``leaves`` tokens, 0 is before the first."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(
        temperature=0,
        max_tokens=_TOKENS,
        ignore_eos=True,
        output_kind=RequestOutputKind.CUMULATIVE,
    )
    text = ""

    async def read() -> None:
        nonlocal text
        seen = 0
        async for output in llm.generate(
            {"prompt_token_ids": prompt}, sampling, request_id=name
        ):
            text = output.outputs[0].text
            seen = len(output.outputs[0].token_ids)
            if leaves is not None and 0 < leaves <= seen:
                return

    reading = asyncio.create_task(read())
    if leaves == 0:
        # Long enough to be looked up, loaded or computed; the client knows nothing.
        await asyncio.wait([reading], timeout=0.01 * (len(name) + len(prompt) % 29))
        reading.cancel()
    await asyncio.wait([reading])
    if not reading.cancelled():
        reading.result()
    return text


async def serve(llm: Any, job: dict[str, Any], name: str) -> list[str | None]:
    """All clients, some at once; None for those who went away."""
    seats = asyncio.Semaphore(_AT_ONCE)

    async def one(number: int) -> str | None:
        async with seats:
            leaves = job["abandoned"][number]
            prompt = job["prompts"][number]
            text = await stream(llm, f"{name}-{number}", prompt, leaves)
            return text if leaves is None else None

    return await asyncio.gather(*map(one, range(len(job["prompts"]))))


async def quiet(llm: Any) -> dict[str, int]:
    """What the engine holds once it has nothing to do, or after 20 s."""
    for number in range(40):
        # The end of a save is heard of in a step, and steps come with requests.
        await stream(llm, f"step-{id(llm)}-{number}", [5, 6, 7], None)
        found = await all_holdings(llm)
        busy = {name for name in found if name.split()[-1] not in _STEADY}
        if not any(found[name] for name in busy):
            break
        await asyncio.sleep(0.5)
    return found


_STEADY = {"threads", "descriptors", "tasks"}


async def work(job: dict[str, Any]) -> dict[str, Any]:
    """Warm up, press, count."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    transfer = None
    if job["extra"] is not None:
        transfer = KVTransferConfig(
            kv_connector="AkvConnector",
            kv_role="kv_both",
            kv_connector_module_path="akv.vllm",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=job["extra"],
        )
    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=job["model"],
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=16,
            block_size=32,
            # Few blocks, so that what is asked again has to be loaded.
            num_gpu_blocks_override=48,
            disable_log_stats=True,
            kv_transfer_config=transfer,
            distributed_executor_backend=Executor,
        )
    )
    try:
        before = after = None
        if transfer is not None:
            warm = {**job, "prompts": job["warm"], "abandoned": [None] * 99}
            await serve(llm, warm, "warm")
            before = await quiet(llm)
        texts = await serve(llm, job, "client")
        if transfer is not None:
            after = await quiet(llm)
        reset = await llm.reset_prefix_cache()
        return {"texts": texts, "before": before, "after": after, "reset": reset}
    finally:
        llm.shutdown()


def main() -> None:
    """Print one line with the result."""
    result = asyncio.run(work(json.loads(sys.stdin.readline())))
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
