"""What a process has imported."""

import json
import subprocess
import sys

HEAVY = {"torch", "transformers", "onnx", "onnx_ir", "onnxscript", "onnxruntime", "tensorrt", "tensorrt_rtx", "triton"}


def loaded_after(code: str) -> tuple[set[str], float]:
    """Top-level names in ``sys.modules`` after ``code`` ran in a fresh interpreter, and the seconds it took."""
    script = (
        f"import sys, time\nstart = time.perf_counter()\n{code}\nseconds = time.perf_counter() - start\n"
        "import json\nprint(json.dumps([sorted({name.split('.')[0] for name in sys.modules}), seconds]))"
    )
    result = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    names, seconds = json.loads(result.stdout.splitlines()[-1])
    return set(names), seconds
