"""A bundle with another chat template, for scripts that need one: the demo pair has none.

    python benchmarks/chat_bundle.py BUNDLE FOLDER [--chat-template FILE]

Makes FOLDER of links to the bundle's files, so it must lie on the same disk, or else they are copied.
``tools_chat.jinja``, the default, tells of tools, and writes calls as Hermes models do.
"""

import argparse
import hashlib
import os
import shutil
from dataclasses import replace
from pathlib import Path

from specexport_runtime.bundle.files import FileEntry
from specexport_runtime.bundle.manifest import load_manifest
from specexport_runtime.bundle.opened import CHAT_TEMPLATE_NAME

TOOLS_TEMPLATE = Path(__file__).with_name("tools_chat.jinja")


def with_chat_template(bundle: Path, folder: Path, template: Path = TOOLS_TEMPLATE) -> Path:
    """Make ``folder`` of a bundle and a template; gives the folder."""
    manifest, text = load_manifest(bundle), template.read_bytes()
    entry = FileEntry(hashlib.sha256(text).hexdigest(), len(text))
    for name in manifest.files:
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if name != CHAT_TEMPLATE_NAME:
            _link(bundle / name, place)
    (folder / CHAT_TEMPLATE_NAME).write_bytes(text)
    replace(manifest, files={**manifest.files, CHAT_TEMPLATE_NAME: entry}).write(folder)
    return folder


def _link(source: Path, place: Path) -> None:
    try:
        os.link(source.resolve(), place)
    except OSError:
        shutil.copyfile(source, place)


def main() -> None:
    """Make the folder that is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--chat-template", type=Path, default=TOOLS_TEMPLATE)
    args = parser.parse_args()
    print(with_chat_template(args.bundle, args.folder, args.chat_template))


if __name__ == "__main__":
    main()
