"""Save the KV blocks of a prompt, look them up, load them elsewhere, cancel a load."""

from __future__ import annotations

import asyncio

import numpy as np

import akv

BLOCK, BLOCKS, PAGE = 16, 8, 4096  # tokens of a block, blocks, bytes of a block
SETTINGS = {"store": "memory:", "max_load_bytes": "1MiB", "max_save_bytes": "1MiB"}


async def main() -> None:
    """An array stands for the engine's KV memory: no engine, no GPU."""
    memory = np.zeros(BLOCKS * PAGE, dtype=np.uint8)
    region = akv.Region(name="layer 0", memory=0, offset=0, stride=PAGE, size=PAGE)
    group = akv.Group(block_size=BLOCK, regions=(region,))
    geometry = akv.Geometry(num_blocks=BLOCKS, hash_unit=BLOCK, groups=(group,))
    device = akv.HostDevice(geometry, [memory])
    config = akv.Config.from_mapping(SETTINGS)
    identity = akv.fingerprint({"model": "my-model", "revision": "1", "dtype": "u8"})

    prompt = list(range(48))  # token ids: three whole blocks
    hashes = akv.block_hashes(prompt, BLOCK)
    memory[: 3 * PAGE] = 7  # computed: the blocks 0, 1 and 2

    async with akv.open_session(config, geometry, device) as session:
        space = (await session.key_space("my-service", identity)).prefix

        span = akv.Span(first_block=0, hashes=hashes, block_ids=(0, 1, 2))
        save = akv.SaveSpec(
            request_id="a", space=space, job_id=1, chain=1, spans=(span,)
        )
        print("stored", (await session.save(save)).stored)

        # The engine computes the last token itself, so its block is not asked for.
        askable = (len(prompt) - 1) // BLOCK
        lookup = akv.LookupSpec(
            request_id="b", space=space, hashes=hashes, askable_blocks=askable
        )
        found = await session.lookup(lookup)
        print("found", found)

        span = akv.Span(first_block=0, hashes=hashes[:found], block_ids=(5, 7))
        load = akv.LoadSpec(
            request_id="b",
            space=space,
            load_id=1,
            local=0,
            usable=found * BLOCK,
            spans=(span,),
        )
        outcome = await session.load(load)
        print("landed", outcome.landed, bool((memory[7 * PAGE :] == 7).all()))

        task = asyncio.create_task(session.load(load))
        await asyncio.sleep(0)  # it has begun
        task.cancel()  # as any task; when it has ended, nothing touches the blocks
        await asyncio.wait([task])
        print("cancelled", task.cancelled())


if __name__ == "__main__":
    asyncio.run(main())
