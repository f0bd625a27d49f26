"""What this machine has. Imports the standard library only."""

from pathlib import Path


def memory_bytes() -> tuple[int, int, int | None]:
    """Installed and available memory in bytes, and the cgroup v2 limit if there is one (0, 0 where unknown)."""
    values: dict[str, int] = {}
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            key, _, rest = line.partition(":")
            values[key] = int(rest.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        return 0, 0, None
    limit: int | None = None
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii"))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        limit = None
    return values.get("MemTotal", 0), values.get("MemAvailable", 0), limit
