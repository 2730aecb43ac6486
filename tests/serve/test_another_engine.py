"""Another engine below the server: one that has the methods of `ServingEngine` and nothing else serves."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from serve_fakes import VOCAB, WordTokenizer, tiny_system
from server import TARGET, Served, events, served
from waiting import wait_for

from moedraft.core import SHARED, FinishReason, InvalidRequest, RequestOutput, SamplingParams, Sequence
from moedraft.engine.port import EngineFigures, OnOutput, ServingEngine, Sink
from moedraft.speculation import SpeculationStats


class Parrot:
    """Answers with the prompt's own tokens, again and again, one for each request in a step."""

    tokenizer = WordTokenizer()
    max_model_len = 64
    vocab_size = VOCAB

    def __init__(self, close: Callable[[], None]) -> None:
        self.close = close
        self._rows: dict[str, tuple[Sequence, OnOutput | None]] = {}
        self._sinks: list[Sink] = []

    @property
    def has_work(self) -> bool:
        return bool(self._rows)

    @property
    def request_ids(self) -> Set[str]:
        return self._rows.keys()

    @property
    def figures(self) -> EngineFigures:
        return EngineFigures(slots=4, running=len(self._rows), waiting=0, speedup=None)

    def subscribe(self, sink: Sink) -> Callable[[], None]:
        self._sinks.append(sink)
        return lambda: self._sinks.remove(sink)

    def work_beside(self) -> None: ...

    def refresh(self, *, now: bool = False) -> None: ...

    def recover(self) -> None:
        for request_id in list(self._rows):
            self.abort(request_id)

    def add(
        self,
        prompt: str | list[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        expert: str | None = None,
        ids: list[int] | None = None,
        on_output: OnOutput | None = None,
        **_: Any,
    ) -> str:
        if expert not in (None, SHARED):
            raise InvalidRequest(f"there is no expert named {expert!r}.")
        tokens = ids or self.tokenizer(str(prompt))["input_ids"]
        assert request_id
        assert params
        row = Sequence(request_id, list(tokens), len(tokens), params, 0)
        row.prompt = str(prompt)
        self._rows[request_id] = row, on_output
        return request_id

    def step(self) -> list[RequestOutput]:
        outputs = []
        for row, _ in list(self._rows.values()):
            row.token_ids.append(row.token_ids[row.num_generated % row.num_prompt_tokens])
            done = row.num_generated == row.params.max_tokens
            outputs.append(self._told(row, "length" if done else None))
        return outputs

    def abort(self, request_id: str) -> RequestOutput | None:
        found = self._rows.get(request_id)
        return self._told(found[0], "abort") if found else None

    def _told(self, row: Sequence, reason: FinishReason | None) -> RequestOutput:
        text, before = self.tokenizer.decode(row.generated), row.text
        row.text, row.finish_reason = text, reason
        output = RequestOutput(
            row.request_id,
            row.prompt,
            text,
            row.generated,
            reason,
            SHARED,
            0,
            SpeculationStats(num_steps=row.num_generated),
            0,
            0.0,
            text[len(before) :],
            row.num_prompt_tokens,
        )
        _, listener = self._rows[row.request_id]
        if reason:
            del self._rows[row.request_id]
            for sink in self._sinks:
                sink(row)
        if listener:
            listener(output)
        return output


@pytest.fixture(scope="module")
def parrot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home: Path = tmp_path_factory.mktemp("parrot")
    system = tiny_system(home)
    engine: Any = Parrot(system.engine.close)
    with served(home, system=replace(system, engine=engine)) as found:
        yield found


def body(**fields: Any) -> dict[str, Any]:
    return {"model": TARGET, "prompt": "1 2 3", "temperature": 0, "max_tokens": 5, **fields}


def test_it_has_the_methods_of_the_port_and_no_others() -> None:
    names = {name for name, _ in inspect.getmembers(ServingEngine) if not name.startswith("_")}
    names |= set(ServingEngine.__annotations__)
    ours = {name for name in dir(Parrot(lambda: None)) if not name.startswith("_")}
    assert ours == names


def test_it_answers(parrot: Served) -> None:
    with parrot.client() as client:
        answer = client.post("/v1/completions", json=body()).json()
        assert answer["choices"][0]["text"].split() == ["1", "2", "3", "1", "2"]
        with client.stream("POST", "/v1/completions", json=body(stream=True)) as response:
            pieces = [event["choices"][0]["text"] for event in events(response) if event["choices"]]
        assert "".join(pieces).split() == ["1", "2", "3", "1", "2"]
        assert client.post("/v1/completions", json=body(model=f"{TARGET}:none")).status_code in (400, 404)
        assert client.get("/ready").status_code == 200
        assert "moedraft" in client.get("/metrics").text


def test_a_client_that_leaves_frees_it(parrot: Served) -> None:
    with (
        parrot.client() as client,
        client.stream("POST", "/v1/completions", json=body(stream=True, max_tokens=60)) as response,
    ):
        next(response.iter_lines())
    wait_for(parrot.idle)
