"""Verification and divergences for speculative decoding, each in PyTorch and, for CUDA, in Triton.

    verify_chain   accept drafted tokens, correct the first wrong one, add one more; the target's distribution
                   is kept exactly (Leviathan et al., arXiv 2211.17192)
    verify_block   the same with a rule that judges a draft as a whole and keeps more of it on average (Sun et
                   al., arXiv 2403.10444)
    verify_coupled, sample_coupled  draft and target choose with the same random numbers, so that a seed fixes
                   the answer whatever the draft (Daliri et al., arXiv 2408.07978)
    round_seeds    random numbers of their own for each round, which verify_block needs
    sample_draft   draw a draft token; returns the log-sum-exp, too, which verification needs
    find_cuts      what top-k, top-p and min-p leave of each row, in eight bytes that the above take as cuts
    divergence     forward and reverse KL, JSD, TVD between teacher and student; loss and gradient in one call
    linear_divergence  the same from hidden states and the output layer, without the logits of all rows

`backend`: "reference" (any device), "triton" (CUDA, or TRITON_INTERPRET=1), "auto" (Triton for CUDA
tensors if it is installed, else the reference). Knows nothing of models, requests or training loops.
"""

from __future__ import annotations

from torch import Tensor

from . import reference, reference_block, reference_coupled, reference_cut
from .backends import Backend, use_triton
from .chain_inputs import check_chain, check_draft, padded
from .cuts import Cuts, apply_cuts, check_cuts, check_limits
from .losses import Kind, divergence, linear_divergence
from .philox import round_seeds
from .reference import DRAFT_INVALID, GREEDY_BELOW, TARGET_INVALID

__all__ = [
    "DRAFT_INVALID",
    "GREEDY_BELOW",
    "TARGET_INVALID",
    "Cuts",
    "Kind",
    "apply_cuts",
    "divergence",
    "find_cuts",
    "linear_divergence",
    "round_seeds",
    "sample_coupled",
    "sample_draft",
    "verify_block",
    "verify_chain",
    "verify_coupled",
]


def verify_chain(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None = None,
    *,
    draft_lse: Tensor | None = None,
    num_draft: Tensor | None = None,
    temperature: Tensor | float,
    seed: Tensor,
    position: Tensor,
    target_cuts: Cuts | None = None,
    draft_cuts: Cuts | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept a prefix of each row's drafted tokens and emit one more, distributed as the target's own tokens.

    target_logits  [B, K+1, V] floating; or packed, [Σ (num_draft+1), V], row after row (num_draft required)
    draft_tokens   int64 [B, K]; the first -1 ends the row, the rest is padding; K may be 0
    draft_logits   [B, K, V] (packed: [Σ num_draft, V]); None: the draft gave each token probability 1
    draft_lse      float32 [B, K], logsumexp(draft_logits / temperature), as `sample_draft` returns it
    num_draft      integers [B], drafted tokens per row, 0 ≤ num_draft ≤ K; None: up to the first -1
    target_cuts    what filters leave of the target's rows, as `find_cuts` returns it; None: all
    draft_cuts     the same of the draft's, as it was when the tokens were drawn
    temperature    float32 [B] or one float; a row with at most 1e-5 is greedy
    seed, position int64 [B]; position is the absolute position of the first token emitted

    Returns tokens int64 [B, K+1] (those accepted, one more, then -1), num_accepted int64 [B], and status
    int32 [B].

    Probabilities are softmax(logits / temperature). Tokens excluded by top-k or top-p have logits of -inf, or
    are excluded by the cuts; in draft_logits those excluded when the token was drawn. Token x at position j
    of a row is accepted when u·draft_probs(x) < target_probs(x), with u from Philox at (seed, position + j,
    accept). At the first rejection the token is drawn from max(0, target − draft), normalised, or from the
    target's row where this is zero everywhere. When all are accepted it is drawn from the target's row. Both
    draws are inverse CDFs at (seed, position + j, resample). Greedy rows are compared with the target's
    argmax, the lowest index on ties, and do not read draft_logits.

    status, for the position at which the row ends:
      TARGET_INVALID  the target's row holds a NaN or +inf, or nothing but -inf. Token 0 stands there as a
                      placeholder, nothing after it; num_accepted counts the valid positions before it.
      DRAFT_INVALID   (sampled rows) the draft's row holds such values, or its token is outside the
                      vocabulary. It is rejected, and one is drawn from the target's row, which is exact.
    Positions behind a row's end are not read. Raises ValueError for shapes, types or a backend that does not
    fit.
    """
    drafts = (draft_tokens, draft_logits, draft_lse, num_draft)
    check_chain(target_logits, *drafts, temperature, seed, position)
    check_cuts(target_logits, target_cuts, "target_cuts")
    check_cuts(draft_logits, draft_cuts, "draft_cuts")
    if use_triton(backend, target_logits):
        from . import verify  # imported on first use: Triton is optional, and slow to import

        return verify.verify_chain(
            target_logits, *drafts, temperature, seed, position, target_cuts, draft_cuts
        )
    target_logits, draft_logits = apply_cuts(target_logits, target_cuts), apply_cuts(draft_logits, draft_cuts)
    if target_logits.dim() == 2:
        target_logits, draft_logits = padded(target_logits, draft_tokens, draft_logits, num_draft)
    return reference.verify_chain(
        target_logits, draft_tokens, draft_logits, draft_lse, num_draft, temperature, seed, position
    )


def verify_block(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None = None,
    *,
    draft_lse: Tensor | None = None,
    num_draft: Tensor | None = None,
    temperature: Tensor | float,
    seed: Tensor,
    position: Tensor,
    target_cuts: Cuts | None = None,
    draft_cuts: Cuts | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """As `verify_chain`, by another rule: on average it accepts at least as many tokens, often more.

    Arguments, results, greedy rows and status are `verify_chain`'s; what is emitted is distributed as the
    target's own tokens. There is one condition more. Which tokens are accepted depends on all of the draft,
    on tokens that are then thrown away too, so nothing of a round may return in a later one: `seed` must be a
    round's own, as `round_seeds` makes them, for this function and for `sample_draft` alike.

    With M the target and S the draft: p_0 = 1, p_i = min(1, p_(i-1)·M(x_i)/S(x_i)); the longest prefix i is
    accepted whose u_i < h_i, where h_i = m_i / (m_i + 1 − p_i), m_i = Σ max(0, p_i·M − S) over the position
    after it, and h = p at the draft's end. The next token is drawn from max(0, p_i·M − S), normalised, or
    from the target's row at the draft's end. A row whose draft is not valid at some position ends there at
    the latest (DRAFT_INVALID if it does).

    Unlike `verify_chain` it reads all of the draft's rows, and the target's twice. Raises ValueError as that
    does.
    """
    drafts = (draft_tokens, draft_logits, draft_lse, num_draft)
    check_chain(target_logits, *drafts, temperature, seed, position)
    check_cuts(target_logits, target_cuts, "target_cuts")
    check_cuts(draft_logits, draft_cuts, "draft_cuts")
    if use_triton(backend, target_logits):
        from . import block

        return block.verify_block(
            target_logits, *drafts, temperature, seed, position, target_cuts, draft_cuts
        )
    target_logits, draft_logits = apply_cuts(target_logits, target_cuts), apply_cuts(draft_logits, draft_cuts)
    if target_logits.dim() == 2:
        target_logits, draft_logits = padded(target_logits, draft_tokens, draft_logits, num_draft)
    return reference_block.verify_block(
        target_logits, draft_tokens, draft_logits, draft_lse, num_draft, temperature, seed, position
    )


def verify_coupled(
    target_logits: Tensor,
    draft_tokens: Tensor,
    draft_logits: Tensor | None = None,
    *,
    draft_lse: Tensor | None = None,
    num_draft: Tensor | None = None,
    temperature: Tensor | float,
    seed: Tensor,
    position: Tensor,
    target_cuts: Cuts | None = None,
    draft_cuts: Cuts | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """As `verify_chain`, for drafts of `sample_coupled`: a seed fixes the answer, whatever the draft.

    Each position's token is the one that `sample_coupled` draws from the target's row with the row's seed at
    that position, distributed as the target's own (Daliri et al., arXiv 2408.07978). Drafted tokens are kept
    as long as they are these, so that neither the draft's tokens nor its distribution, length or version can
    change what is emitted; draft_logits and draft_lse are checked and not read. Greedy rows and
    TARGET_INVALID are `verify_chain`'s. Raises ValueError as `verify_chain` does.
    """
    drafts = (draft_tokens, draft_logits, draft_lse, num_draft)
    check_chain(target_logits, *drafts, temperature, seed, position)
    check_cuts(target_logits, target_cuts, "target_cuts")
    check_cuts(draft_logits, draft_cuts, "draft_cuts")
    if use_triton(backend, target_logits):
        from . import coupled

        return coupled.verify_coupled(
            target_logits, draft_tokens, num_draft, temperature, seed, position, target_cuts
        )
    target_logits = apply_cuts(target_logits, target_cuts)
    if target_logits.dim() == 2:
        target_logits, _ = padded(target_logits, draft_tokens, None, num_draft)
    return reference_coupled.verify_coupled(
        target_logits, draft_tokens, num_draft, temperature, seed, position
    )


def sample_coupled(
    logits: Tensor,
    temperature: Tensor | float,
    seed: Tensor,
    position: Tensor,
    backend: Backend = "auto",
    *,
    cuts: Cuts | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `sample_draft`, for `verify_coupled`: argmax of logits/temperature + Gumbel(seed, position, token).

    Two rows with the same seed and position tend to give the same token, the more alike they are.
    """
    check_draft(logits, temperature, seed, position)
    check_cuts(logits, cuts, "cuts")
    if use_triton(backend, logits):
        from . import coupled

        return coupled.sample_coupled(logits, temperature, seed, position, cuts)
    return reference_coupled.sample_coupled(apply_cuts(logits, cuts), temperature, seed, position)


def sample_draft(
    logits: Tensor,
    temperature: Tensor | float,
    seed: Tensor,
    position: Tensor,
    backend: Backend = "auto",
    *,
    cuts: Cuts | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token per row of logits [B, V], by an inverse CDF at Philox (seed, position, propose).

    logits are filtered (-inf) but not divided by the temperature; temperature float32 [B] or one float; seed,
    position int64 [B], the position of the token that is drawn. Returns tokens int64 [B]; lse float32 [B] =
    logsumexp(logits / temperature), which `verify_chain` takes as draft_lse; and the probability of the most
    likely token, float32 [B]. Greedy rows (temperature up to 1e-5) give the argmax, lowest index on ties, and
    both numbers of the unscaled logits. A row with a NaN, a +inf or nothing but -inf gives token 0 and NaN
    for both. Raises ValueError for shapes or a backend that do not fit.
    """
    check_draft(logits, temperature, seed, position)
    check_cuts(logits, cuts, "cuts")
    if use_triton(backend, logits):
        from . import verify

        return verify.sample_draft(logits, temperature, seed, position, cuts)
    return reference.sample_draft(apply_cuts(logits, cuts), temperature, seed, position)


def find_cuts(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    backend: Backend = "auto",
) -> Cuts:
    """What filters leave of each row of logits [B, V] or [B, T, V], not divided by the temperature.

    temperature, top_p and min_p float32 [B], top_k int64 [B]; a row with a top_k of 0 or at least V, a top_p
    of 1 or a min_p of 0 is not filtered by it, greedy rows (temperature 0) not at all. As in transformers:
    the k largest logits with those that equal the k-th; then the smallest set whose mass reaches top_p (the
    mass is measured after top-k; the largest logit always stays; of equal logits those of lower index); then
    what is at least min_p times as likely as the most likely token. Rows with a NaN, a +inf or nothing but
    −inf are left as they are.

    The Triton version neither sorts nor writes logits nor waits for the host. Its sums are float32: the mass
    that is left is right to a millionth, and the set is the reference's but for tokens of less mass than that
    together. Usually there is none; with a top_p within a millionth of 1 it may be several (5 of 5 000 at
    0.999999). Raises ValueError for shapes, types or a backend that do not fit.
    """
    check_limits(logits, {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p})
    if use_triton(backend, logits):
        from . import fused_cut

        return fused_cut.find_cuts(logits, temperature, top_k, top_p, min_p)
    return reference_cut.find_cuts(logits, temperature, top_k, top_p, min_p)
