"""One system of `bench_peers.py`, in whatever environment it lives: answers of a fixed length, timed outside.

Reads a JSON line {"prompts": [[token ids]], "tokens": n}, answers greedily with exactly n tokens each, and
writes {"answers": [[token ids]]}. Needs nothing of moedraft but for the system of that name.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

Answer = Callable[[list[list[int]], int], list[list[int]]]


def transformers(model: str, dtype: str, threads: int) -> Answer:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    hf.generation_config.eos_token_id = None

    def answer(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        out = hf.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0
        )
        return [row[ids.shape[1] :] for row in out.tolist()]

    return answer


def moedraft(model: str, dtype: str, threads: int) -> Answer:
    import torch

    from moedraft.core import SamplingParams
    from moedraft.drafting.drafter import NoDrafter
    from moedraft.engine.engine import Engine
    from moedraft.models import load_model
    from moedraft.routing.selector import FixedSelector

    torch.set_num_threads(threads)
    target = load_model(model, "target", "cpu", dtype)
    engine = Engine(target, target.tokenizer, NoDrafter(), FixedSelector())

    def answer(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        return [output.token_ids for output in engine.generate(prompts, params)]

    return answer


def vllm(model: str, dtype: str, threads: int, **options: Any) -> Answer:
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}"
    from vllm import LLM, SamplingParams

    llm = LLM(model=model, dtype=dtype, max_model_len=1024, max_num_seqs=8, **options)

    def answer(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return answer


def vllm_ngram(model: str, dtype: str, threads: int) -> Answer:
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
    return vllm(model, dtype, threads, speculative_config=ngram)


def llama_cpp(model: str, dtype: str, threads: int, ngram: bool = False) -> Answer:
    """The GGUF file as it is, by llama.cpp's own server with eight slots."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_parallel, params.n_ctx = 8, 8 * 1024
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    if ngram:
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
    server = xllamacpp.Server(params)

    def one(ids: list[int], tokens: int) -> list[int]:
        """The server answers with text, so that only the number of tokens is known."""
        asked = {"prompt": ids, "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        found = server.handle_completions(asked | {"cache_prompt": False})
        return [-1] * int(found["usage"]["completion_tokens"])

    def answer(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda ids: one(ids, tokens), prompts))

    return answer


def llama_cpp_ngram(model: str, dtype: str, threads: int) -> Answer:
    return llama_cpp(model, dtype, threads, ngram=True)


def openvino(model: str, dtype: str, threads: int, **options: Any) -> Answer:
    """The GGUF file, by OpenVINO GenAI; batches by its continuous batching."""
    import numpy
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs = 8
    scheduler.cache_size = 1
    pipe = openvino_genai.LLMPipeline(
        model, "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=threads, **options
    )

    def answer(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        ids = numpy.array(prompts, dtype=numpy.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(numpy.ones_like(ids)))
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
        if options:
            config.num_assistant_tokens, config.max_ngram_size = 4, 4
        return [list(found) for found in pipe.generate(inputs, config).tokens]

    return answer


def openvino_lookup(model: str, dtype: str, threads: int) -> Answer:
    return openvino(model, dtype, threads, prompt_lookup=True)


SYSTEMS = {
    "transformers": transformers,
    "moedraft": moedraft,
    "vllm": vllm,
    "vllm-ngram": vllm_ngram,
    "llama.cpp": llama_cpp,
    "llama.cpp-ngram": llama_cpp_ngram,
    "openvino": openvino,
    "openvino-lookup": openvino_lookup,
}


def main() -> None:
    system, model, dtype, threads = sys.argv[1:5]
    lines, sys.stdout = sys.stdout, sys.stderr  # whatever libraries print
    answer = SYSTEMS[system](model, dtype, int(threads))
    print(json.dumps({"ready": True}), file=lines, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps({"answers": answer(asked["prompts"], asked["tokens"])}), file=lines, flush=True)


if __name__ == "__main__":
    main()
