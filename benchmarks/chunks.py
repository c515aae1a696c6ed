"""What F, B and W cost in CPU time, beside plain PyTorch autograd on the same model.

    python benchmarks/chunks.py [--rounds N]

One process and one thread; a stage with all layers, the embedding and the head. A round is the
micro-batches of an iteration, first ours, then plain: F, B and W of each in turn, gradients added
over the micro-batches. Plain has one backward for both B and W. Printed are the CPU time of a
micro-batch, the least over the rounds of every part, and ours as a multiple of plain. The goal is
1 for all parts together.

Shapes: T tokens of a micro-batch, V vocabulary.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar, cast

import torch
import torch.nn.functional as nnf
from executor_cases import MODEL, NUM_MICROBATCHES, SEED, loss_scale, micro_batches
from executor_peer import PlainPart
from torch import Tensor

from resihp.executor.device.interface import Communicator
from resihp.executor.heap import settle_memory
from resihp.executor.model import Key
from resihp.executor.models.llama import Llama
from resihp.executor.packing import IGNORED_TARGET, MicroBatch
from resihp.executor.reduce import FastReducer
from resihp.executor.shards import StageShards
from resihp.executor.tp import SingleMember

T = TypeVar("T")
LAST = MODEL.num_hidden_layers - 1
ALLOWED_ERROR = 1e-4


class Clock:
    """CPU time of the process by part, added up over a round."""

    def __init__(self) -> None:
        self.spent_s: dict[str, float] = defaultdict(float)

    def timed(self, part: str, work: Callable[[], T]) -> T:
        start_s = time.process_time()
        result = work()
        self.spent_s[part] += time.process_time() - start_s
        return result


class Ours:
    """The executor's stage, with the sums of the numerics `fast`."""

    def __init__(self, num_tokens: int) -> None:
        model = Llama(MODEL)
        names = model.tensors(0, LAST)
        parameters = {name: model.initial(name, SEED) for name in names}
        self._batches = micro_batches(num_tokens)
        self._scale = loss_scale(self._batches)
        self._stage = model.stage(0, LAST, SingleMember(), parameters)
        # Nothing is exchanged: one member is as good as any group.
        alone = cast("Communicator", SingleMember())
        self._reducer = FastReducer(StageShards(model, names, 1, 1, 0), {0: alone}, alone)

    def run(self, clock: Clock) -> None:
        self._reducer.discard()  # what the round before added
        for number, batch in enumerate(self._batches):
            key = (0, number)
            clock.timed("F", lambda key=key, batch=batch: self._forward(key, batch))
            clock.timed("B", lambda key=key: self._stage.backward_input(key, None))
            clock.timed("W", lambda key=key: self._backward_weight(key))

    def _forward(self, key: Key, batch: MicroBatch) -> None:
        self._stage.forward(key, batch, None, loss_scale=self._scale)

    def _backward_weight(self, key: Key) -> None:
        self._stage.add_weight_gradients(key, self._reducer.sums())

    def gradients(self) -> dict[str, Tensor]:
        return self._reducer.reduce()


class Plain:
    """Weights are leaves, backward is one call."""

    def __init__(self, num_tokens: int) -> None:
        self._batches = micro_batches(num_tokens)
        self._scale = loss_scale(self._batches)
        self._part = PlainPart(0, LAST, self._batches)

    def run(self, clock: Clock) -> None:
        for weight in self._part.by_name.values():
            weight.grad = None
        for number, batch in enumerate(self._batches):
            mb = torch.tensor(number)
            loss = clock.timed("F", lambda mb=mb, batch=batch: self._forward(mb, batch))
            clock.timed("B+W", lambda loss=loss: torch.autograd.backward(loss))

    def _forward(self, mb: Tensor, batch: MicroBatch) -> Tensor:
        logits_TV = self._part(batch.input_ids_T[None], mb)
        losses_T = nnf.cross_entropy(
            logits_TV, batch.targets_T, ignore_index=IGNORED_TARGET, reduction="none"
        )
        return losses_T.sum() * self._scale

    def gradients(self) -> dict[str, Tensor]:
        return self._part.gradients()


def measure(num_tokens: int, num_rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of a micro-batch by part, of ours and of plain."""
    ours, plain = Ours(num_tokens), Plain(num_tokens)
    least: tuple[dict[str, float], dict[str, float]] = ({}, {})
    for number in range(num_rounds + 1):
        for side, found in zip((ours, plain), least, strict=True):
            clock = Clock()
            side.run(clock)
            for part, spent_s in clock.spent_s.items():
                if number:  # the first round warms up
                    found[part] = min(found.get(part, spent_s), spent_s)
        if not number:
            compare(ours.gradients(), plain.gradients())
    of_one = [{part: s / NUM_MICROBATCHES for part, s in found.items()} for found in least]
    return of_one[0], of_one[1]


def compare(ours: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    """Two sides that train different things are not worth comparing."""
    for name, expected in plain.items():
        error = float((ours[name] - expected).abs().max() / expected.abs().max())
        assert error < ALLOWED_ERROR, f"{name}: gradients differ by {error:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rounds",
        type=int,
        default=20,
        help="iterations of each side, in turn (default: %(default)s)",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="*",
        default=[1024, 256, 32],
        help="of a micro-batch (default: %(default)s)",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settle_memory()
    columns = ("F ms", "B ms", "W ms", "all ms", "plain F", "plain all", "F/plain", "B+W/plain")
    print(f"{'tokens':>6}" + "".join(f"{name:>11}" for name in (*columns, "all/plain")))
    for num_tokens in arguments.tokens:
        ours, plain = measure(num_tokens, arguments.rounds)
        backward_s = ours["B"] + ours["W"]
        all_s, plain_s = ours["F"] + backward_s, plain["F"] + plain["B+W"]
        times = (ours["F"], ours["B"], ours["W"], all_s, plain["F"], plain_s)
        ratios = (ours["F"] / plain["F"], backward_s / plain["B+W"], all_s / plain_s)
        cells = [f"{1e3 * s:11.2f}" for s in times] + [f"{ratio:11.3f}" for ratio in ratios]
        print(f"{num_tokens:6}" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
