"""Which arguments do the parts of Transformer Engine have that Megatron-core's layers use?

    pip download --no-deps transformer_engine==2.11.0 && unzip transformer_engine-*.whl -d DIR
    python tools/transformer_engine_signatures.py DIR/transformer_engine [--check]

Reads the source (no GPU, nothing is imported) and writes ``signatures.json`` of the stand-in in
``megatron_dcpo/rehearsal/stand_in``; ``--check`` compares and exits with 1 where the file says
something else.
"""

from __future__ import annotations

import argparse
import ast
import json
from pathlib import Path

TARGET = (
    Path(__file__).parents[1]
    / "megatron_dcpo/rehearsal/stand_in/transformer_engine/pytorch/signatures.json"
)
# name in the stand-in: file of the package, and class and function, or function
PARTS = {
    "Linear.__init__": ("pytorch/module/linear.py", "Linear.__init__"),
    "Linear.forward": ("pytorch/module/linear.py", "Linear.forward"),
    "LayerNormLinear.__init__": ("pytorch/module/layernorm_linear.py", "LayerNormLinear.__init__"),
    "LayerNormLinear.forward": ("pytorch/module/layernorm_linear.py", "LayerNormLinear.forward"),
    "GroupedLinear.__init__": ("pytorch/module/grouped_linear.py", "GroupedLinear.__init__"),
    "GroupedLinear.forward": ("pytorch/module/grouped_linear.py", "GroupedLinear.forward"),
    "RMSNorm.__init__": ("pytorch/module/rmsnorm.py", "RMSNorm.__init__"),
    "DotProductAttention.__init__": (
        "pytorch/attention/dot_product_attention/dot_product_attention.py",
        "DotProductAttention.__init__",
    ),
    "DotProductAttention.forward": (
        "pytorch/attention/dot_product_attention/dot_product_attention.py",
        "DotProductAttention.forward",
    ),
    "apply_rotary_pos_emb": ("pytorch/attention/rope.py", "apply_rotary_pos_emb"),
}
# what RMSNorm's **kwargs reach (pytorch/ops/basic/rmsnorm.py)
PASSED_ON = {"RMSNorm.__init__": ("pytorch/ops/basic/rmsnorm.py", "RMSNorm.__init__")}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("package", type=Path)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    found = {name: arguments(args.package / file, where) for name, (file, where) in PARTS.items()}
    for name, (file, where) in PASSED_ON.items():
        found[name] = sorted({*found[name], *arguments(args.package / file, where)})
    text = json.dumps(found, indent=1) + "\n"
    if not args.check:
        TARGET.write_text(text)
    elif TARGET.read_text() != text:
        recorded = json.loads(TARGET.read_text())
        for name in found:
            if recorded.get(name) != found[name]:
                print(f"{name}: recorded {recorded.get(name)}, found {found[name]}")
        return 1
    print(f"{len(found)} signatures")
    return 0


def arguments(file: Path, where: str) -> list[str]:
    """Names of the arguments, without ``self``, of a function or of a class's method."""
    nodes: list[ast.AST] = list(ast.parse(file.read_text()).body)
    for part in where.split("."):
        [node] = [
            n for n in nodes if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == part
        ]
        nodes = list(node.body)
    assert isinstance(node, ast.FunctionDef)
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return [name for name in names if name != "self"]


if __name__ == "__main__":
    raise SystemExit(main())
