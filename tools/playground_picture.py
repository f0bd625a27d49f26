"""Take the picture of the playground that the README shows: a real run in the system's Chromium, on an idle machine.

.venv/bin/python tools/playground_picture.py engines/demo
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LARGEST_BYTES = 200_000
WAIT_MS = 120_000


def main() -> None:
    """Serve the bundle, run the page's first example twice, and save what it shows of the second run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "playground.png")
    parser.add_argument("--scheme", choices=["light", "dark"], default="light")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=720)
    parser.add_argument("--scale", type=float, default=1.5)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with serving(options.bundle) as url:
        print(take(url, options))
    shrink(options.out)
    size = options.out.stat().st_size
    print(f"{options.out}: {size} bytes")
    if size > LARGEST_BYTES:
        sys.exit(f"the picture is larger than {LARGEST_BYTES} bytes. Fix: give a smaller --scale.")


@contextmanager
def serving(bundle: Path) -> Iterator[str]:
    """The address of a server of the bundle, which ends with the block."""
    command = [str(Path(sys.executable).with_name("specexport")), "serve", str(bundle), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            line = next((line for line in server.stderr or () if " Serving " in line), None)
            if line is None:
                sys.exit("the server did not start.")
            yield line.split()[-1].rstrip(".")
        finally:
            server.send_signal(signal.SIGTERM)


def take(url: str, options: argparse.Namespace) -> str:
    """Save the picture; gives what the page says of the run."""
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        sys.exit("there is no chromium in the path.")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox"] if os.geteuid() == 0 else [], env=dict(os.environ)
        )
        page = browser.new_page(
            viewport={"width": options.width, "height": options.height},
            device_scale_factor=options.scale,
            color_scheme=options.scheme,
        )
        page.goto(url)
        page.locator("#drafter option").first.wait_for(state="attached")
        page.fill("#max-tokens", str(options.tokens))
        for _ in range(2):  # the first run touches the weights for the first time
            page.click("#run")
            page.wait_for_selector("#run:enabled", timeout=WAIT_MS)
        show_a_round(page)
        page.screenshot(path=options.out, full_page=True)
        said = f"{page.inner_text('#speedup')}, {page.inner_text('#race-speculative')} against "
        said += f"{page.inner_text('#race-plain')}; {page.inner_text('#equal')}"
        browser.close()
    return said


def show_a_round(page: Any) -> None:
    """Scroll the texts to where the model begins, and point at a round as a reader would."""
    for box in ("#speculative", "#plain"):
        page.eval_on_selector(f"{box} [data-output]", "(e) => e.scrollTo({top: 138, behavior: 'instant'})")
    page.locator("#chart circle.bonus").nth(2).hover()
    page.wait_for_timeout(400)  # until nothing moves


def shrink(path: Path) -> None:
    """Fewer colours: a page has not many."""
    from PIL import Image

    with Image.open(path) as image:
        small = image.convert("RGB").quantize(255, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    small.save(path, optimize=True)


if __name__ == "__main__":
    main()
