"""Peak memory against a ledger: what each instruction takes and gives back, one after the other."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

from plan_generator import as_schedule, generate
from report_plans import edit, plan_text

from resihp.ir.facts import Facts, StageFacts
from resihp.ir.lanes import BY_TRANSFER, EDGES, Edge, Lane, Task, lanes_of
from resihp.ir.model import GroupName, Op, Plan
from resihp.ir.parser import parse
from resihp.ir.transfers import Transfer, transfers_of
from resihp.ir.verify import verify
from resihp.ir.verify.memory import live_spans, peaks_of


def random_facts(plan: Plan, rng: random.Random) -> Facts:
    """Other sizes for every stage of every group."""

    def sizes() -> StageFacts:
        released, kept = rng.randrange(50), rng.randrange(50)
        return StageFacts(
            state_bytes=rng.randrange(50),
            activation_bytes=released + kept,
            released_by_b_bytes=released,
            weight_input_grad_bytes=rng.randrange(20),
            boundary_bytes=8 * rng.randrange(10),
        )

    return Facts(stages={g.name: tuple(sizes() for _ in g.layers) for g in plan.groups})


class Ledger:
    """What one member of a lane holds while the lane goes on; an overlapped pair is one step."""

    def __init__(self, lanes: Mapping[GroupName, Lane], lane: Lane, facts: Facts) -> None:
        self.lanes, self.lane = lanes, lane
        self.sizes = dict(zip(lane.stages, facts.stages[lane.name], strict=True))
        self.live = self.peak = sum(sizes.state_bytes for sizes in self.sizes.values())
        self.transfers = [t for t in transfers_of(lanes) if lane.name in (t.sender, t.receiver)]
        self.posted: dict[Transfer, int] = {}
        """Bytes of the sends that nothing has proved taken."""

    def run(self) -> int:
        index = 0
        while index < len(self.lane.body):
            step = range(index, index + (2 if index in self.lane.pairs else 1))
            self.learn(step)
            self.live += sum(self.takes(at) for at in step)
            self.peak = max(self.peak, self.live)
            self.live -= sum(self.gives(at) for at in step)
            index = step.stop
        return self.peak

    def learn(self, step: range) -> None:
        """Forget the sends that the inputs of a step prove taken."""
        for answer in self.transfers:
            if answer.receiver == self.lane.name and answer.use in step:
                for sent in list(self.posted):
                    used = sent.use
                    if sent.receiver == answer.sender and used is not None and used < answer.send:
                        self.live -= self.posted.pop(sent)

    def takes(self, at: int) -> int:
        task, op = self.lane.tasks[at], self.lane.body[at].op
        if task is None:
            return 0
        sizes, edge = self.sizes[task.stage], BY_TRANSFER.get(op)
        if edge is not None:
            return self.transfer_takes(at, op, edge, task)
        kept = sum(sizes.boundary_bytes for edge in EDGES if self.hands_over(edge, op, task))
        if op is Op.F:
            return kept + sizes.activation_bytes
        return kept + (sizes.weight_input_grad_bytes if op in (Op.B, Op.BW) else 0)

    def transfer_takes(self, at: int, op: Op, edge: Edge, task: Task) -> int:
        whole = self.sizes[task.stage].boundary_bytes
        if op is edge.gather:
            return whole
        if op is edge.recv:
            return self.part(at, whole, cut=(edge.gather, task) in self.lane.first)
        if op is edge.send:
            transfer = next(t for t in self.transfers if (t.sender, t.send) == (self.lane.name, at))
            cut = (edge.scatter, task) in self.lane.first
            self.posted[transfer] = self.part(at, whole, cut=cut)
            return self.posted[transfer]
        return 0

    def part(self, at: int, whole: int, *, cut: bool) -> int:
        """What one member has of a tensor that is sent or received at `at`."""
        far_end = self.lane.far_end(at)
        assert far_end is not None
        num_chunks = max(self.lane.group.tp, self.lanes[far_end[0]].group.tp) if cut else 1
        return whole * max(1, num_chunks // self.lane.group.tp) // num_chunks

    def hands_over(self, edge: Edge, op: Op, task: Task) -> bool:
        user = task.at(task.stage + edge.stage_step)
        return op in edge.produce and self.lane.find(edge.consume, user) is not None

    def gives(self, at: int) -> int:
        task, op = self.lane.tasks[at], self.lane.body[at].op
        if task is None:
            return 0
        sizes = self.sizes[task.stage]
        if op in (Op.GATHER_ACT, Op.GATHER_GRAD):
            edge = BY_TRANSFER[op]
            return self.part(self.lane.first[edge.recv, task], sizes.boundary_bytes, cut=True)
        given = sum(self.input_gives(edge, task) for edge in EDGES if op in edge.consume)
        if op in (Op.B, Op.BW):
            given += sizes.released_by_b_bytes
        if op in (Op.W, Op.BW):
            given += sizes.activation_bytes - sizes.released_by_b_bytes
            given += sizes.weight_input_grad_bytes
        return given

    def input_gives(self, edge: Edge, task: Task) -> int:
        maker = task.at(task.stage - edge.stage_step)
        if self.lane.find(edge.produce, maker) is not None:
            return self.sizes[maker.stage].boundary_bytes
        received = (edge.recv, task) in self.lane.first
        return self.sizes[task.stage].boundary_bytes if received else 0


def plans() -> Iterator[tuple[Plan, Facts]]:
    for seed in range(150):
        rng = random.Random(seed)
        plan = generate(rng)
        plan = as_schedule(plan) if rng.random() < 0.2 else plan
        yield plan, random_facts(plan, rng)


def test_the_peak_is_that_of_a_ledger():
    """With all that plans can have: stages, pairs, peers, chunks, handovers, posted sends."""
    for plan, facts in plans():
        lanes = lanes_of(plan)
        peaks = peaks_of(lanes, facts)
        assert peaks == {name: Ledger(lanes, lane, facts).run() for name, lane in lanes.items()}


V = plan_text(
    "F[0] 0; send_act[0] 0; recv_act[3] 0; F[3] 0; BW[3] 0; send_grad[3] 0; recv_grad[0] 0;"
    "BW[0] 0; reduce_grads[0]; reduce_grads[3]; step",
    "recv_act[1] 0; F[1] 0; F[2] 0; send_act[2] 0; recv_grad[2] 0; BW[2] 0; BW[1] 0;"
    "send_grad[1] 0; reduce_grads[1]; reduce_grads[2]; step",
    layers=("0..1,6..7", "2..3,4..5"),
    microbatches=1,
    lines=("memory 1000",),
)
"""Stages 1 and 2 on one rank."""


def sized(*state_bytes: int) -> StageFacts:
    (state,) = state_bytes
    return StageFacts(
        state_bytes=state,
        activation_bytes=100,
        released_by_b_bytes=60,
        weight_input_grad_bytes=10,
        boundary_bytes=7,
    )


def test_states_of_the_stages_of_a_group_add_up():
    """RHP602 for the sum, though each alone would fit."""
    facts = Facts(
        stages=dict.fromkeys((GroupName(0, 0), GroupName(0, 1)), (sized(600), sized(500)))
    )
    found = verify(parse(V), facts=facts)
    assert [(f.code, f.span.line) for f in found] == [("RHP602", 6), ("RHP602", 7)]
    assert "takes 1.074 KiB" in found[0].message


def test_the_live_set_names_stages_and_what_is_handed_over():
    """At the peak: activations of both stages, and the gradient between them."""
    facts = Facts(
        stages=dict.fromkeys((GroupName(0, 0), GroupName(0, 1)), (sized(400), sized(390)))
    )
    found = verify(parse(V), facts=facts)
    assert [f.hint for f in found if f.message.startswith("dp0.pp1")] == [
        "alive here: state 790 bytes; activations of [1] 0, [2] 0 200 bytes; output gradients of "
        "[2] 0 10 bytes; gradients in place of [2] 0 7 bytes; receive buffers of [2] 0 7 bytes"
    ]


def test_a_tensor_in_place_is_kept_from_its_making_to_its_use():
    """Work in between lengthens its life."""
    lanes = lanes_of(parse(V).plan)
    facts = Facts(stages=dict.fromkeys(lanes, (sized(0), sized(0))))
    lane = lanes[GroupName(0, 1)]
    spans = [span for span in live_spans(lanes, facts)[lane.name] if "in place" in span.what]
    assert [
        (span.what, lane.text(span.first), lane.text(span.last)) for span in spans
    ] == [
        ("activations in place", "`F[1] 0`", "`F[2] 0`"),
        ("gradients in place", "`BW[2] 0`", "`BW[1] 0`"),
    ]  # fmt: skip


def test_a_pair_takes_all_before_it_gives_anything_back():
    """Overlapped it needs the activations of both; one after the other it does not."""
    text = plan_text("F 0; F 1 & BW 0; BW 1", microbatches=2, level="schedule")
    apart = edit(text, ("F 1 & BW 0; BW 1", "BW 0; F 1; BW 1"))
    peaks: list[int] = []
    for plan in (parse(text).plan, parse(apart).plan):
        lanes = lanes_of(plan)
        facts = Facts(stages=dict.fromkeys(lanes, (sized(0),)))
        peaks += peaks_of(lanes, facts).values()
    assert peaks == [210, 110]
