import sys
def test_path():
    import hf_ctxmodels
    print("ZZ", hf_ctxmodels.__file__, sys.path[:6])
    assert 0
