"""Stages of plain modules against plain autograd, where torch's own split backward was wrong."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
import torch.nn.functional as nnf
from cases import LOSS_SCALE, assert_same_bits, backward_input, backward_weight, forward, run
from cases import text_batches as batches_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from resihp.errors import ConfigError
from resihp.executor.model import StageOptions
from resihp.executor.models.module import ModuleModel, Piece
from resihp.executor.models.module_stage import ModuleStage
from resihp.executor.tp import SingleMember

WIDTH, VOCAB = 24, 272


class SharedTwice(nn.Module):
    """One linear, used twice (pytorch issue 180952)."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.linear(torch.tanh(self.linear(x)))


class SharedByThree(nn.Module):
    """Three linears that hold one weight, with biases of their own."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.second.weight = self.first.weight
        self.third.weight = self.first.weight

    def forward(self, x):
        return x + self.third(self.second(torch.sin(self.first(x))))


class Chunked(nn.Module):
    """The outputs of one linear go several ways (pytorch issue 170277); one goes nowhere."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v, _ = self.qkv(self.norm(x)).chunk(4, dim=-1)
        first, second = (q * k.sigmoid()).unflatten(-1, (2, -1)).unbind(-2)
        return x + self.out(torch.cat((second, first), -1) + v)


class Several(nn.Module):
    """A submodule returns several tensors, which are used apart and together."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.gate = (nn.Linear(WIDTH, 2 * WIDTH) for _ in range(2))

        def forward(self, x):
            hidden = self.up(x)
            return hidden, {"gate": self.gate(x).sigmoid(), "sum": hidden.sum(-1, keepdim=True)}

    def __init__(self):
        super().__init__()
        self.both = self.Both()
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        hidden, rest = self.both(x)
        return x + self.down(hidden * rest["gate"] + rest["sum"])


class Checkpointed(nn.Module):
    """Recomputed inside B (pytorch issue 153833's neighbourhood), around shared weights."""

    use_reentrant = False

    def __init__(self):
        super().__init__()
        self.shared, self.chunked = SharedByThree(), Chunked()

    def forward(self, x):
        return checkpoint(
            lambda x: self.chunked(self.shared(x)), x, use_reentrant=self.use_reentrant
        )


class Reentrant(Checkpointed):
    use_reentrant = True


class CheckpointInCheckpoint(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = Checkpointed(), SharedTwice()

    def forward(self, x):
        return checkpoint(lambda x: self.outer(self.inner(x)), x, use_reentrant=False)


class WithoutGradient(nn.Module):
    """A linear over something that needs no gradient: positions."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Linear(3, WIDTH)

    def forward(self, x):
        at = torch.arange(x.shape[0], dtype=x.dtype)[:, None]
        return x + self.positions(torch.cat((at.sin(), at.cos(), at / 64), -1))


class ByHand(nn.Module):
    """A linear's weight, used through the layer and directly."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return nnf.linear(self.linear(x) * self.scale, self.linear.weight.t())


class Deep(nn.Module):
    """More than two dims, and a result changed in place."""

    def __init__(self):
        super().__init__()
        self.heads = nn.Linear(6, 6)

    def forward(self, x):
        y = self.heads(x.unflatten(-1, (2, 2, 6)).transpose(1, 2))
        y += 1.0
        return x + y.transpose(1, 2).flatten(1)


class OfAVector(nn.Module):
    """Linears over one vector: what all tokens have in common."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x):
        return x * self.out(self.into(x.mean(0)).tanh())


class Encoder(nn.Module):
    """Torch's own layer, whose attention goes round its linears' forward."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 48, dropout=0.0, batch_first=True)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[0])
        return self.layer(x[None], src_mask=mask, is_causal=True)[0]


class WeightNormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return x + self.linear(x)


BITWISE = [
    SharedTwice,
    SharedByThree,
    Chunked,
    Several,
    Checkpointed,
    Reentrant,
    CheckpointInCheckpoint,
    WithoutGradient,
    ByHand,
    Deep,
    OfAVector,
    Encoder,
    WeightNormed,
]


def model_of(*layers, **options):
    return ModuleModel(
        Piece(lambda: nn.Embedding(VOCAB, WIDTH), lambda m, batch: m(batch.input_ids_T)),
        [Piece(layer, lambda m, x_TD, batch: m(x_TD)) for layer in layers],
        Piece(lambda: nn.Linear(WIDTH, VOCAB), lambda m, x_TD, batch: m(x_TD)),
        hidden_size=WIDTH,
        vocab_size=VOCAB,
        **options,
    )


def initial(model):
    return {n: model.initial(n, seed=3) for n in model.tensors(0, model.num_layers - 1)}


def stages_of(model, partition, recompute=False):
    whole = initial(model)
    return [
        model.stage(
            first,
            last,
            SingleMember(),
            {name: whole[name] for name in model.tensors(first, last)},
            StageOptions(recompute=recompute),
        )
        for first, last in partition
    ]


def plain(model, layers, batch):
    """Loss and gradients of the modules as they are: leaves, one graph, one backward."""
    whole = nn.ModuleDict(
        {"embedding": nn.Embedding(VOCAB, WIDTH), "head": nn.Linear(WIDTH, VOCAB)}
    )
    whole["layers"] = stack = nn.ModuleList(layer() for layer in layers)
    names = dict(whole.named_parameters())
    with torch.no_grad():
        for name, value in initial(model).items():
            names[name].copy_(value)
    x_TD = whole["embedding"](batch.input_ids_T)
    for layer in stack:
        x_TD = layer(x_TD)
    losses_T = nnf.cross_entropy(whole["head"](x_TD), batch.targets_T, reduction="none")
    (losses_T.sum() * LOSS_SCALE).backward()
    grads = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in names.items()
        if p.requires_grad
    }
    return float(losses_T.detach().double().sum()), grads


@pytest.fixture
def batches(tmp_path):
    return batches_of(tmp_path, 4)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # F without a graph
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("layer", BITWISE)
def test_gradients_have_the_bits_of_plain_autograd(batches, layer, recompute):
    """Whatever a layer does with its weights and outputs, B and W give autograd's gradients."""
    model = model_of(layer, SharedTwice, layer)
    for partition in ([(0, 2)], [(0, 0), (1, 1), (2, 2)]):
        stages = stages_of(model, partition, recompute)
        for batch in batches[:2]:
            loss, grads = run(stages, batch)
            expected_loss, expected = plain(model, [layer, SharedTwice, layer], batch)
            assert loss == expected_loss
            assert_same_bits(grads, expected)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_w_gives_the_gradients_of_its_own_micro_batch(batches, order):
    """W runs in any order after all B, on two steps in a row: nothing is stale or mixed."""
    layers = [Checkpointed, Encoder]
    model = model_of(*layers)
    stages = stages_of(model, [(0, 0), (1, 1)])
    expected = [plain(model, layers, batch)[1] for batch in batches[:3]]
    keys = [(0, 0), (0, 1), (1, 0)]
    for _ in range(2):
        for key, batch in zip(keys, batches, strict=False):
            forward(stages, key, batch)
        for key in reversed(keys):
            backward_input(stages, key)
        for number in order:
            assert_same_bits(backward_weight(stages, keys[number]), expected[number])
        assert all(stage.is_idle for stage in stages)


@pytest.mark.parametrize("layer", BITWISE)
def test_w_into_a_sum_adds_what_w_would_have_made(batches, layer):
    """Whatever is deferred and whatever autograd adds to a leaf, to rounding."""
    model = model_of(layer)
    (stage,) = stages_of(model, [(0, model.num_layers - 1)])
    _, expected = run([stage], batches[0])
    forward([stage], (0, 0), batches[0])
    backward_input([stage], (0, 0))
    sums = {name: torch.zeros(p.shape) for name, p in stage.parameters.items()}
    stage.add_weight_gradients((0, 0), sums)
    for name, total in sums.items():
        torch.testing.assert_close(total, expected[name])


def test_linear_weights_have_no_gradient_before_w(batches):
    """B leaves the cost of linears to W: between the two there is nothing but their operands."""
    (stage,) = stages_of(model_of(Chunked), [(0, 0)])
    forward([stage], (0, 0), batches[0])
    stage.backward_input((0, 0), None)
    assert isinstance(stage, ModuleStage)
    store, leaf_grads = stage._awaiting[0, 0]
    assert set(leaf_grads) == {"layers.0.norm.weight", "layers.0.norm.bias"}
    assert {entry.name for entry in store._entries} == set(stage.parameters) - set(leaf_grads)


def test_an_unused_parameter_has_a_gradient_of_zeros(batches):
    """Every parameter of the stage is reduced, so every one has a gradient."""

    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.not_used = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

        def forward(self, x):
            return self.used(x)

    model = model_of(Unused)
    _, grads = run(stages_of(model, [(0, 0)]), batches[0])
    assert not grads["layers.0.not_used.weight"].any()
    assert_same_bits(grads, plain(model, [Unused], batches[0])[1])


def test_a_frozen_parameter_is_a_constant(batches):
    """It is no tensor of the model, and every build gives the same."""

    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.linear.bias.requires_grad_(False).fill_(0.5)

        def forward(self, x):
            return self.linear(x)

    model = model_of(Frozen)
    assert "layers.0.linear.bias" not in model.tensors(0, 0)
    _, grads = run(stages_of(model, [(0, 0)]), batches[0])
    assert_same_bits(grads, plain(model, [Frozen], batches[0])[1])


def test_hooks_on_parameters_run(batches):
    """A layer whose weight somebody watches is left to autograd (pytorch issue 144530)."""
    seen = []

    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.linear.weight.register_hook(lambda grad: seen.append(grad.shape))

        def forward(self, x):
            return self.linear(x)

    model = model_of(Watched)
    _, grads = run(stages_of(model, [(0, 0)]), batches[0])
    assert seen == [(WIDTH, WIDTH)]
    assert_same_bits(grads, plain(model, [Watched], batches[0])[1])


def test_the_stage_computes_with_the_tensors_that_it_is_given(batches):
    """An update in place of the state is an update of the module."""
    model = model_of(SharedTwice)
    (stage,) = stages_of(model, [(0, 0)])
    before, _ = run([stage], batches[0])
    with torch.no_grad():
        for parameter in stage.parameters.values():
            parameter.mul_(0.5)
    after, _ = run([stage], batches[0])
    assert after != before


def test_a_second_build_begins_with_the_same_weights():
    """Weights depend on the piece's name and the seed, not on who builds what before."""
    once, again = model_of(SharedTwice, Encoder), model_of(SharedTwice, Encoder)
    torch.rand(7)
    backwards = {n: again.initial(n, seed=3) for n in reversed(list(initial(once)))}
    assert_same_bits(backwards, initial(once))
    name = "layers.0.linear.weight"
    assert not torch.equal(once.initial(name, seed=3), once.initial(name, seed=4))


def test_tied_tensors_begin_equal():
    """The output side takes the weights of the input side."""
    model = model_of(SharedTwice, tied=[("embedding.weight", "head.weight")])
    whole = initial(model)
    assert torch.equal(whole["embedding.weight"], whole["head.weight"])


def test_a_buffer_that_changes_is_refused(batches):
    """Running statistics are state that no plan knows of."""
    model = model_of(lambda: nn.BatchNorm1d(WIDTH))
    (stage,) = stages_of(model, [(0, 0)])
    with pytest.raises(ConfigError, match=r"changed the buffer layers.0."):
        stage.forward((0, 0), batches[0], None, loss_scale=1.0)


def test_dropout_is_refused_unless_it_is_said():
    """Random numbers cost a seed for each piece: the user says where they are."""
    model = model_of(lambda: nn.Dropout(0.5))
    with pytest.raises(ConfigError, match="stochastic=True"):
        stages_of(model, [(0, 0)])


@pytest.mark.parametrize("recompute", [False, True])
def test_a_micro_batch_that_is_run_again_gets_the_same_random_numbers(batches, recompute):
    """[T18] Elsewhere too, and after others: they are keyed by sample and piece."""
    layers = [lambda: nn.Dropout(0.5), SharedTwice, lambda: nn.Dropout(0.5)]
    model = model_of(*layers, stochastic=True)
    loss, grads = run(stages_of(model, [(0, 2)]), batches[0])
    elsewhere = stages_of(model, [(0, 0), (1, 2)], recompute)
    other_loss, _ = run(elsewhere, batches[1])
    loss_again, grads_again = run(elsewhere, batches[0])
    assert loss_again == loss != other_loss
    assert_same_bits(grads_again, grads)


def test_an_aborted_iteration_leaves_nothing(batches):
    """After `discard_all` the same micro-batch runs anew, with its own gradients."""
    model = model_of(Encoder)
    (stage,) = stages_of(model, [(0, 0)])
    forward([stage], (0, 0), batches[0])
    forward([stage], (0, 1), batches[1])
    stage.backward_input((0, 1), None)
    stage.discard_all()
    assert stage.is_idle
    _, grads = run([stage], batches[0])
    assert_same_bits(grads, plain(model, [Encoder], batches[0])[1])
