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


@pytest.mark.parametrize("value", [np.int64(3), np.array([3])], ids=["a single number", "of 8 bytes each"])
def test_what_plotly_js_does_not_read_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="no column"):
        json.dumps({"height": value}, default=pack_array)
