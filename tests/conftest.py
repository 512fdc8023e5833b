"""Hygiene: a test leaves the environment, the process group, the generators and the threads as it found them."""

import os
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

# The machine's load must not decide whether a law holds.
settings.register_profile("samestep", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("samestep")


def pytest_collection_modifyitems(items):
    without = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(without)


@pytest.fixture(autouse=True)
def clean_environment():
    before = dict(os.environ)
    yield
    # pytest and torch write these themselves.
    ignored = {"PYTEST_CURRENT_TEST", "KMP_INIT_AT_FORK", "KMP_DUPLICATE_LIB_OK", "TORCHINDUCTOR_CACHE_DIR"}
    after = {key: value for key, value in os.environ.items() if key not in ignored}
    changed = {key for key in {*before, *after} - ignored if before.get(key) != after.get(key)}
    os.environ.clear()
    os.environ.update(before)
    assert not changed, f"the test left environment variables changed: {sorted(changed)}"


@pytest.fixture(autouse=True)
def closed_process_group():
    yield
    left_open = dist.is_available() and dist.is_initialized()
    if left_open:
        dist.destroy_process_group()
    assert not left_open, "the test left a process group open"


@pytest.fixture(autouse=True)
def same_settings():
    dtype, threads, grad = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    yield
    changed = (torch.get_default_dtype(), torch.is_grad_enabled()) != (dtype, grad)
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)
    torch.set_num_threads(threads)
    assert not changed, "the test left torch's default dtype or grad mode changed"
