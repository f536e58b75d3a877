import base64
import json

import numpy as np
import pytest

from ddp_prof.present.charts import pack_array


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.int32])
def test_a_packed_column_holds_the_same_numbers(kind: type) -> None:
    column = np.array([[1, -2, 3], [4, 5, 6]], kind)[:, ::2]  # not contiguous
    packed = json.loads(json.dumps(column, default=pack_array))
    found = np.frombuffer(base64.b64decode(packed["bdata"]), packed["dtype"])
    assert found.reshape([int(length) for length in packed["shape"].split(",")]).tolist() == column.tolist()


def test_what_is_not_known_stays_so() -> None:
    packed = pack_array(np.array([1.5, np.nan]))
    assert np.isnan(np.frombuffer(base64.b64decode(packed["bdata"]), packed["dtype"])).tolist() == [False, True]


def test_a_single_number_is_not_taken_for_a_column() -> None:
    with pytest.raises(TypeError, match="not a column"):
        json.dumps({"height": np.int64(3)}, default=pack_array)
