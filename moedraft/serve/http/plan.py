"""Turns a validated request body into arguments for the engine: expert, prompts, limits, sampling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from moedraft.config import Settings
from moedraft.core import SamplingParams
from moedraft.serve.http.errors import ApiError
from moedraft.serve.http.model_names import expert_of, target_name
from moedraft.serve.http.schema import ChatMessage, ChatRequest, CompletionRequest, Generation

Prompt = str | list[int]
Conversation = tuple[ChatMessage, ...]  # becomes a prompt only once it is prepared
COMPLETION_TOKENS = 16  # the default of OpenAI's API
MOST_LOGPROBS = 100_000  # of one answer that is sent in one piece; each of them is an object of its own
LONGEST_STOP = 1000  # characters; text is held back while it could be the beginning of a stop string


@dataclass(frozen=True)
class GenerationPlan:
    """One request: `n` answers to each of `prompts`, all with the same expert and sampling."""

    model: str
    expert: str | None
    prompts: Sequence[Prompt | Conversation]
    n: int
    params: SamplingParams
    draft: bool
    capture: bool
    stream: bool
    include_usage: bool
    topic: str | None = None  # what the router looks at in a conversation that becomes token ids

    def choices(self) -> Iterator[SamplingParams]:
        """The parameters of the `n` answers to a prompt; answer i uses the seed plus i."""
        for i in range(self.n):
            seed = self.params.seed
            own = seed if seed is None else (seed + i) % 2**63
            yield replace(self.params, seed=own)

    @property
    def routed_first(self) -> bool:
        """A router that is asked must choose before the answer begins: a seeded one depends on who drafts."""
        seeded = self.params.seed is not None and self.params.temperature > 0
        return seeded and self.expert is None and (self.draft or self.capture)


def plan_completion(
    request: CompletionRequest, settings: Settings, domains: tuple[str, ...]
) -> GenerationPlan:
    several = request.prompt if isinstance(request.prompt, list) else [request.prompt]
    prompts: list[Prompt] = [one for one in several if not isinstance(one, int)]
    if not prompts:
        prompts = [[one for one in several if isinstance(one, int)]]
    usual = min(COMPLETION_TOKENS, settings.max_output_tokens)
    return _plan(request, prompts, request.max_tokens or usual, request.logprobs, settings, domains)


def plan_chat(request: ChatRequest, settings: Settings, domains: tuple[str, ...]) -> GenerationPlan:
    if request.top_logprobs is not None and not request.logprobs:
        raise _bad("top_logprobs", "'top_logprobs' needs 'logprobs' to be true.")
    given = (request.max_tokens, request.max_completion_tokens)
    if None not in given and given[0] != given[1]:
        raise _bad("max_tokens", "'max_tokens' and 'max_completion_tokens' differ; give one of them.")
    longest = given[1] or given[0] or settings.max_output_tokens
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    plan = _plan(request, [tuple(request.messages)], longest, logprobs, settings, domains)
    asked = [message.text for message in request.messages if message.role == "user"]
    # The template's own words, and a conversation's beginning, say little about the question.
    return replace(plan, topic=asked[-1] if asked else None)


def _plan(
    request: Generation,
    prompts: Sequence[Prompt | Conversation],
    max_tokens: int,
    logprobs: int | None,
    settings: Settings,
    domains: tuple[str, ...],
) -> GenerationPlan:
    n, stop = request.n or 1, [request.stop] if isinstance(request.stop, str) else request.stop or []
    _check_limits(settings, max_tokens, n * len(prompts), stop)
    if not request.stream:
        _check_logprobs(max_tokens, n * len(prompts), logprobs)
    if request.stream_options is not None and not request.stream:
        raise _bad("stream_options", "'stream_options' needs 'stream' to be true.")
    options = request.stream_options
    return GenerationPlan(
        model=request.model,
        expert=expert_of(request.model, target_name(settings), domains),
        prompts=prompts,
        n=n,
        params=SamplingParams(
            temperature=1.0 if request.temperature is None else request.temperature,
            top_k=request.top_k or 0,
            top_p=1.0 if request.top_p is None else request.top_p,
            min_p=request.min_p or 0.0,
            max_tokens=max_tokens,
            stop=tuple(stop),
            seed=None if request.seed is None else request.seed % 2**63,
            ignore_eos=bool(request.ignore_eos),
            logprobs=logprobs,
        ),
        draft=request.draft is not False,
        capture=settings.capture and request.store is not False,
        stream=bool(request.stream),
        include_usage=options is not None and bool(options.include_usage),
    )


def _check_limits(settings: Settings, max_tokens: int, choices: int, stop: list[str]) -> None:
    if max_tokens > settings.max_output_tokens:
        limit = settings.max_output_tokens
        raise _bad("max_tokens", f"'max_tokens' is at most {limit} here, not {max_tokens}.")
    if choices > settings.max_n:
        raise _bad("n", f"A request gets at most {settings.max_n} answers (prompts times n), not {choices}.")
    if len(stop) > settings.max_stop_strings:
        raise _bad("stop", f"At most {settings.max_stop_strings} stop strings are taken, not {len(stop)}.")
    if any(not one or len(one) > LONGEST_STOP for one in stop):
        raise _bad("stop", f"A stop string has 1 to {LONGEST_STOP} letters.")


def _check_logprobs(max_tokens: int, choices: int, logprobs: int | None) -> None:
    """Refuse too many log-probabilities: the limits of the request alone would allow millions of objects."""
    most = 0 if logprobs is None else choices * max_tokens * (logprobs + 1)
    if most > MOST_LOGPROBS:
        raise _bad(
            "max_tokens",
            f"Answers times 'max_tokens' times log-probabilities of a token are at most {MOST_LOGPROBS}, "
            f"not {most}; ask for less of one of them, or for a stream.",
        )


def _bad(param: str, sentence: str) -> ApiError:
    return ApiError(400, sentence, param=param, code="invalid_value")
