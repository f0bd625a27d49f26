"""The worker that interprets kernels, one for a test session."""

from collections.abc import Iterator

import pytest

from tests.support.references.kernel_worker import InterpretedKernels


@pytest.fixture(scope="session")
def kernels() -> Iterator[InterpretedKernels]:
    worker = InterpretedKernels()
    yield worker
    worker.close()
