"""One process of real vLLM with the real model: asks, and prints JSON.

Started by the tests with a JSON object in argv: ``model``, ``rounds`` (each a
list of prompts as token ids or text; the prefix cache is reset between
rounds), ``extra`` (akv's settings, or null for vLLM without akv), ``stay``
(live on until standard input is closed).
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main() -> None:
    """Ask, and print one line with the answers."""
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    job: dict[str, Any] = json.loads(sys.argv[1])
    transfer = None
    if job["extra"] is not None:
        transfer = KVTransferConfig(
            kv_connector="AkvConnector",
            kv_role="kv_both",
            kv_connector_module_path="akv.vllm",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=job["extra"],
        )
    llm = LLM(
        model=job["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        block_size=32,
        kv_transfer_config=transfer,
    )
    sampling = SamplingParams(temperature=0, max_tokens=12)
    rounds = []
    for prompts in job["rounds"]:
        outputs = [
            llm.generate(
                [{"prompt_token_ids": p} if isinstance(p, list) else p],
                sampling,
                use_tqdm=False,
            )[0]
            for p in prompts
        ]
        rounds.append(
            [
                {
                    "text": output.outputs[0].text,
                    "tokens": len(output.prompt_token_ids or ()),
                    "cached": output.num_cached_tokens,
                }
                for output in outputs
            ]
        )
        for _ in range(100):
            if llm.reset_prefix_cache():
                break
        else:
            raise SystemExit("the prefix cache could not be reset")
    print("RESULT " + json.dumps(rounds), flush=True)
    if job.get("stay"):
        # What this engine lends to a pool is there for as long as it lives.
        sys.stdin.read()


if __name__ == "__main__":
    main()
