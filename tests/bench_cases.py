"""Arms, prompts and programmed decodings for the tests of bench, report and export."""

from collections.abc import Callable, Sequence

from draft_models import TREES, build_draft
from target_models import build_prompt

from dreams_nas.bench.arms import PLAIN, Arm, ReadyArm
from dreams_nas.bench.measure import Prompt
from dreams_nas.decode.engine import DecodeResult, Round
from dreams_nas.draft.model import DraftModel
from dreams_nas.space.arch import DraftArch
from dreams_nas.space.search_space import DIMENSIONS, SearchSpace
from dreams_nas.space.tree import StaticTree
from dreams_nas.targets.huggingface import HuggingFaceTarget
from dreams_nas.targets.protocol import Target, TargetInputs

ARCH = DraftArch(tap="last", head_ratio=0.5, ffn_ratio=0.5, keep_ratio=0.25, vocab=0.5)
BASELINE_ARCH = DraftArch(tap="0.5")


def with_policy(draft: DraftModel, tree: StaticTree) -> DraftModel:
    """The draft with this tree as its own."""
    draft.config = draft.config.replace(policy=tree)
    return draft


def build_arms(target: HuggingFaceTarget) -> list[Arm]:
    """plain, winner and eagle3 with random drafts."""
    winner = with_policy(build_draft(target, ARCH), TREES["bushy"])
    baseline = with_policy(build_draft(target, BASELINE_ARCH, seed=1), TREES["chain"])
    return [
        PLAIN,
        Arm("winner", winner, TREES["bushy"]),
        Arm("eagle3", baseline, TREES["chain"]),
    ]


def build_prompts(target: HuggingFaceTarget, num_prompts: int) -> list[Prompt]:
    """Random prompts, by turns with one image, two, and none."""
    counts = (1, 2, 0) if target.takes_images else (0,)
    return [
        Prompt(f"p{i}", build_prompt(target, counts[i % len(counts)], seed=i))
        for i in range(num_prompts)
    ]


def space_of(arch: DraftArch) -> SearchSpace:
    """The space of this one draft."""
    return SearchSpace(**{name: (getattr(arch, name),) for name in DIMENSIONS})


def programmed(
    tokens: Sequence[int], accepted: Sequence[int], *, prefill_s: float, decode_s: float
) -> DecodeResult:
    """A decoding that took exactly this long."""
    rounds = [
        Round((), tuple(range(count)), decode_s / max(1, len(accepted))) for count in accepted
    ]
    return DecodeResult(list(tokens), rounds, prefill_s, decode_s, stopped=False)


DecodeOne = Callable[[Target, ReadyArm, TargetInputs, int], DecodeResult]


class Program:
    """Hands out programmed decodings and remembers who asked, in which order."""

    def __init__(self, prompts: Sequence[Prompt], decode: Callable[..., DecodeResult]) -> None:
        """`decode(arm name, prompt index, how many times this pair was decoded before)`."""
        self._index = {id(prompt.inputs): i for i, prompt in enumerate(prompts)}
        self._decode = decode
        self.calls: list[tuple[str, int]] = []

    def __call__(
        self, target: Target, ready: ReadyArm, inputs: TargetInputs, max_new_tokens: int
    ) -> DecodeResult:
        call = (ready.arm.name, self._index[id(inputs)])
        self.calls.append(call)
        return self._decode(*call, self.calls.count(call) - 1)
