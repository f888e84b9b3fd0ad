"""Ray's workers that are forked from one process, in tests."""

import sys

import pytest
import ray

pytestmark = pytest.mark.ray


def test_forked_workers_draw_different_names_for_their_objects(local_ray):
    @ray.remote(num_cpus=0)
    class Drawer:
        def draw(self):
            return ray.ObjectRef.from_random().hex(), "rlvlm.runs.train" in sys.modules

    (one, forked), (other, forked_too) = ray.get([each.draw.remote() for each in (Drawer.remote(), Drawer.remote())])
    assert forked and forked_too and one != other
