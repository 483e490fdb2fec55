"""Tensor maps, as the stub of the driver gets them."""

from __future__ import annotations

from stubbed_gpu import run

from fastattn.cuda.job import MAPPED_FIELDS


def test_maps_are_parameters_of_their_own():
    code = """
q = np.ones((2, 70, 4, 64), np.float16).swapaxes(1, 2)
k, v = np.ones((2, 2, 300, 64), np.float16), np.ones((1, 1, 300, 64), np.float16)
v = np.broadcast_to(v, k.shape)
out = Array(np.ones(q.shape, np.float16))
fastattn.attention(*map(Array, (q, k, v)), out=out)
text = str(fastattn.explain(*map(Array, (q, k, v)), out=out))
text += str(fastattn.explain(Array(q), Array(k[:, :, ::-1]), Array(v), out=out))
raw = (ctypes.c_int64 * COUNT).from_address(library.fake_jobs())
print(json.dumps([log(), list(raw[-3:]), [a.ctypes.data for a in (q, k, v)], text]))
""".replace("COUNT", str(len(MAPPED_FIELDS)))
    environment = {"FASTATTN_WGMMA": 1, "FAKE_PARAMETERS": len(MAPPED_FIELDS)}
    lines, found, places, text = run(code, **environment)
    assert found == places
    ends = "1 1 1 1, 3 3"
    assert [line for line in lines if line.startswith("map")] == [
        f"map 6, 64 70 4 2, 512 128 35840, 64 192 1 1, {ends}",
        f"map 6, 64 300 2 2, 128 38400 76800, 64 128 1 1, {ends}",
        f"map 6, 64 300 1 1, 128 16 16, 64 128 1 1, {ends}",
    ]
    launches = [line for line in lines if line.startswith("launch")]
    assert [line.split(", ")[:2] for line in launches] == [["launch 8 1 1", "512 1 1"]]
    assert "\nkernel      warpgroups: tensor cores multiply float16, sums are float32\n" in text
    # keys backwards
    assert "\nkernel      forward: " in text
    assert "; no wgmma: no tensor map has such axes or strides\n" in text
