import pickle

import pytest

from samestep import errors


@pytest.mark.parametrize("name", errors.__all__)
def test_fields_survive_a_process_boundary(name):
    kind = getattr(errors, name)
    error = kind("what", rank=2, step=7, name="weight")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (str(copy), copy.rank, copy.step, copy.name, copy.common) == ("what", 2, 7, "weight", False)


def test_the_tree():
    assert issubclass(errors.SpecError, ValueError)
    assert issubclass(errors.WorkerError, errors.GroupError)
    assert issubclass(errors.AgreementError, errors.GroupError)
    assert all(issubclass(getattr(errors, name), errors.SamestepError) for name in errors.__all__)


def test_exit_codes_are_those_of_the_command_line():
    codes = {name: getattr(errors, name).exit_code for name in errors.__all__}
    assert codes["SpecError"] == 2
    assert codes["WorkerError"] == 3
    assert codes["ReplicaMismatchError"] == 1
