"""Attention and MLP blocks by dataflow: on made-up graphs of a few nodes (``test_architectures`` has traces)."""

import re

import onnx_ir as ir
import pytest

from specexport.passes.residual_blocks import find_residual_blocks
from tests.support.references.ort_operators import _PARALLEL


def leak(layer: int, kind: str) -> str:
    return f"layer {layer}'s {kind} is read beyond the residual stream"


LAYER = """
n{i} = RMSNormalization({x}, w)
q{i} = MatMul(n{i}, wq)
k{i} = MatMul(n{i}, wk)
t{i}, k_cache_out.{i}, v_cache_out.{i} = UnpaddedAttention(q{i}, k{i}, k_cache.{i}, v_cache.{i}, lens)
o{i} = MatMul(t{i}, wo)
a{i} = Add({x}, o{i})
m{i} = RMSNormalization(a{i}, w)
u{i} = MatMul(m{i}, wu)
d{i} = MatMul(u{i}, wd)
b{i} = Add(a{i}, d{i})
"""


def two_layers(**changes: str) -> str:
    """A sequential model of two layers; each change replaces the line that makes a value (``name="new lines"``)."""
    lines = ["e = Gather(table, ids)"]
    lines += (LAYER.format(i=0, x="e") + LAYER.format(i=1, x="b0")).split("\n")
    lines.append("logits = MatMul(b1, head)")
    for name, new in changes.items():
        at = next(at for at, line in enumerate(lines) if line.split(" = ")[0].split(",")[0] == name)
        lines[at] = new
    return "\n".join(lines)


def parse(text: str) -> ir.Model:
    """A graph of lines ``a, b = Op(c, d)``; cache outputs and ``logits`` are its outputs."""
    values: dict[str, ir.Value] = {}

    def value(name: str) -> ir.Value:
        return values.setdefault(name, ir.Value(name=name))

    nodes = []
    for line in filter(None, map(str.strip, text.split("\n"))):
        outputs, op_type, inputs = re.fullmatch(r"([\w., ]+) = (\w+)\(([\w., ]*)\)", line).groups()  # type: ignore[union-attr]
        given, made = ([value(name) for name in names.split(", ")] for names in (inputs, outputs))
        domain = "specexport" if op_type == "UnpaddedAttention" else ""
        nodes.append(ir.Node(domain, op_type, given, outputs=made))
    made = {output for node in nodes for output in node.outputs}
    inputs = [value for name, value in values.items() if value not in made and not name.startswith(("w", "table"))]
    outputs = [value for name, value in values.items() if name == "logits" or "_out." in name]
    graph = ir.Graph(inputs, outputs, nodes=nodes, name="g")
    for name, weight in values.items():
        if name.startswith(("w", "table")):
            weight.const_value = ir.tensor([1.0], name=name)
            graph.register_initializer(weight)
    graph.sort()
    return ir.Model(graph, ir_version=10)


def found(text: str) -> list[tuple[str | None, str | None]]:
    """Names of residual and total of each block; fails on an obstacle."""
    result = find_residual_blocks(parse(text))
    assert result.obstacle is None
    assert [(block.kind, block.layer) for block in result.blocks] == [
        (kind, layer) for layer in range(len(result.blocks) // 2) for kind in ("attention", "MLP")
    ]
    return [(block.residual.name, block.total.name) for block in result.blocks]


STREAM = [("e", "a0"), ("a0", "b0"), ("b0", "a1"), ("a1", "b1")]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"a0": "p0 = RMSNormalization(o0, w)\na0 = Add(p0, e)"},  # a norm after the branch; the operands swapped
        {"a0": "p0 = Mul(o0, w_scale)\na0 = Add(e, p0)", "b1": "p1 = Mul(w_scale, d1)\nb1 = Add(p1, a1)"},
        {"o0": "r0 = MatMul(t0, wo)\no0 = Add(r0, w_bias)", "k0": "s0 = MatMul(n0, wk)\nk0 = Add(w_bias, s0)"},
        {"o1": "g1 = MatMul(n1, wg)\nh1 = Mul(t1, g1)\no1 = MatMul(h1, wo)"},  # attention gated by its own input
        {"d0": "r0 = MatMul(m0, wr)\ns0 = MatMul(m0, we)\nf0 = Mul(s0, u0)\ng0 = Add(f0, r0)\nd0 = MatMul(g0, wd)"},
        {"e": "c = Gather(table, ids)\np = Gather(table_p, positions)\ne = Add(c, p)"},
        {"o0": "side = Gather(table_2, ids)\nr0 = Add(t0, side)\no0 = MatMul(r0, wo)"},  # input of its own
    ],
)
def test_what_happens_inside_a_branch_does_not_matter(changes: dict[str, str]) -> None:
    assert found(two_layers(**changes)) == STREAM


def test_a_stream_that_changes_only_its_shape_is_followed() -> None:
    text = two_layers(
        m0="v0 = Reshape(a0, w_shape)\nm0 = RMSNormalization(v0, w)", b0="f0 = Add(v0, d0)\nb0 = Reshape(f0, w_shape)"
    )
    assert found(text) == [("e", "a0"), ("v0", "f0"), ("b0", "a1"), ("a1", "b1")]


@pytest.mark.parametrize(
    ("changes", "obstacle"),
    [
        (
            {"m0": "m0 = RMSNormalization(e, w)", "a0": "s0 = Add(o0, d0)\na0 = Add(s0, e)", "b0": "b0 = Relu(a0)"},
            _PARALLEL,
        ),
        ({"m0": "m0 = RMSNormalization(e, w)"}, _PARALLEL),
        ({"m0": "m0 = Identity(n0)"}, _PARALLEL),
        (
            {"a1": "z1 = Add(b0, o1)\na1 = LayerNormalization(z1, w)"},
            "layer 1 passes the residual stream itself through LayerNormalization",
        ),
        (
            {"b0": "z0 = Add(a0, d0)\nb0 = LayerNormalization(z0, w)"},
            "layer 1 does not read the residual stream as layer 0 left it",
        ),
        ({"a1": "z1 = Mul(b0, w_scale)\na1 = Add(z1, o1)"}, "layer 1's attention is not added to the residual stream"),
        ({"a0": "a0 = Mul(e, o0)"}, "layer 0's attention is not added to the residual stream"),
        ({"k1": "k1 = Identity(k0)"}, leak(0, "attention")),
        ({"d1": "z1 = Add(u1, u0)\nd1 = MatMul(z1, wd)"}, leak(0, "MLP")),
        ({"n1": "z1 = Add(b0, e)\nn1 = RMSNormalization(z1, w)"}, leak(0, "attention")),
        ({"o0": "z0 = Gather(k_cache_out.0, w_at)\ny0 = Mul(t0, z0)\no0 = MatMul(y0, wo)"}, leak(0, "attention")),
        ({"logits": "z = Add(b1, a0)\nlogits = MatMul(z, head)"}, leak(0, "MLP")),
        ({"u1": "extra_out.0 = MatMul(m1, wu)\nu1 = Relu(extra_out.0)"}, leak(1, "MLP")),
        ({"u0": "z0 = Gather(k_cache_out.0, w_at)\ny0 = MatMul(m0, z0)\nu0 = MatMul(y0, wu)"}, leak(0, "attention")),
    ],
)
def test_anything_else_is_an_obstacle_with_a_name(changes: dict[str, str], obstacle: str) -> None:
    result = find_residual_blocks(parse(two_layers(**changes)))
    assert result.blocks == ()
    assert result.obstacle == obstacle


def test_a_model_without_attention_has_nothing_to_skip() -> None:
    result = find_residual_blocks(parse("e = Gather(table, ids)\nlogits = MatMul(e, w)"))
    assert result.obstacle == "the model has no layer with attention or a recurrence"


CONV = "t0, state_out.0, pending_out.0 = UnpaddedCausalConv(q0, k0, state.0, pending.0)"
SPACE = "\ns0, state_out.1, pending_out.1 = UnpaddedLinearAttention(t0, state.1, pending.1)"
SKIP = "\nh0 = Mul(t0, w_skip)\nr0 = Add(s0, h0)"  # what a state space passes on beside its state


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({"t0": CONV}, ("recurrence", "MLP", "attention", "MLP")),
        ({"t0": CONV + SPACE + SKIP, "o0": "o0 = MatMul(r0, wo)"}, ("recurrence", "MLP", "attention", "MLP")),
        (  # side by side, on what one norm gives
            {"o0": CONV.replace("t0", "j0") + "\ni0 = MatMul(t0, wo)\no0 = Add(i0, j0)"},
            ("attention and recurrence", "MLP", "attention", "MLP"),
        ),
        ({"t0": CONV, "m0": "", "u0": "", "d0": "", "b0": "b0 = Identity(a0)"}, ("recurrence", "", "attention", "MLP")),
        ({"b1": "b1 = Identity(a1)"}, ("attention", "MLP", "attention", "")),
        (  # the last norm as its parts, and a head with a bias
            {
                "b1": "y1 = Mul(a1, a1)\nz1 = Add(y1, w_eps)\nb1 = Mul(a1, z1)",
                "logits": "l = MatMul(b1, head)\nlogits = Add(l, w_b)",
            },
            ("attention", "MLP", "attention", ""),
        ),
    ],
)
def test_recurrences_and_layers_without_an_mlp_have_blocks(changes: dict[str, str], kinds: tuple[str, ...]) -> None:
    result = find_residual_blocks(parse(two_layers(**changes)))
    assert result.obstacle is None
    assert result.gate_kinds == kinds
    assert [block.gate for block in result.blocks] == [gate for gate, kind in enumerate(kinds) if kind]


@pytest.mark.parametrize(
    ("changes", "obstacle"),
    [
        ({"t0": CONV, "a0": "a0 = Mul(e, o0)"}, "layer 0's recurrence is not added to the residual stream"),
        ({"t0": CONV, "u0": "z0 = Add(m0, state_out.0)\nu0 = MatMul(z0, wu)"}, leak(0, "recurrence")),
        (  # a convolution in front of layer 1's attention, which reads what layer 0's was given
            {"t0": CONV, "t1": "t1, k_cache_out.1, v_cache_out.1 = UnpaddedAttention(q1, t0, k_cache.1, v_cache.1)"},
            leak(0, "recurrence"),
        ),
    ],
)
def test_a_recurrence_that_is_no_branch_of_its_own_is_an_obstacle(changes: dict[str, str], obstacle: str) -> None:
    result = find_residual_blocks(parse(two_layers(**changes)))
    assert (result.obstacle, result.blocks) == (obstacle, ())


def test_a_subgraph_reads_what_its_nodes_read() -> None:
    model = parse(two_layers())
    by_name = {value.name: value for node in model.graph for value in node.outputs}
    inner = ir.node("Relu", [by_name["n0"]])
    reader = ir.node("If", [model.graph.inputs[0]])
    for key in ("then_branch", "else_branch"):
        copy = ir.node("Relu", [by_name["n0"]]) if key == "else_branch" else inner
        reader.attributes.add(ir.AttrGraph(key, ir.Graph([], copy.outputs, nodes=[copy], name=key)))
    model.graph.append(reader)
    assert find_residual_blocks(model).obstacle == leak(0, "attention")
