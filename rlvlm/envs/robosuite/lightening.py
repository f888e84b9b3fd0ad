"""Makes a compiled model lighter to draw: on a CPU its hundreds of thousands of triangles are what an image costs.

Only what is drawn changes: faces and textures. Contacts are found with hulls and shapes that stay as they are.
"""
# pyright: reportAttributeAccessIssue=false
# mujoco ships no type stubs, and its names live in compiled modules

import mujoco
import numpy as np

_FEW_FACES = 200
"""Meshes with fewer are left alone."""
_CELLS_ACROSS = 10
"""A mesh keeps at least so many cells along its longest side."""


def thin_meshes(model: mujoco.MjModel, cell_m: float) -> None:
    """Merges, for drawing, the vertices of each mesh that share a cube of side `cell_m`, metres.

    Faces that collapse or coincide are dropped; those that stay keep their normals and texture coordinates.
    """
    for mesh in range(model.nmesh):
        first, count = int(model.mesh_faceadr[mesh]), int(model.mesh_facenum[mesh])
        if count < _FEW_FACES:
            continue
        start = int(model.mesh_vertadr[mesh])
        vertices = model.mesh_vert[start : start + int(model.mesh_vertnum[mesh])]
        side = min(cell_m, float(np.ptp(vertices, axis=0).max()) / _CELLS_ACROSS)
        cubes = np.floor(vertices / side).astype(np.int64)
        _, representative, cube_of = np.unique(cubes, axis=0, return_index=True, return_inverse=True)
        faces = representative[cube_of.ravel()][model.mesh_face[first : first + count]]
        is_flat = (faces == np.roll(faces, 1, axis=1)).any(axis=1)
        turned = np.take_along_axis(faces, (faces.argmin(axis=1)[:, None] + np.arange(3)) % 3, axis=1)
        _, distinct = np.unique(turned, axis=0, return_index=True)  # two sides of a thin plate are two faces
        kept = np.setdiff1d(distinct, np.flatnonzero(is_flat))
        if not len(kept):
            continue
        stays = slice(first, first + len(kept))
        model.mesh_face[stays] = faces[kept]
        model.mesh_facenormal[stays] = model.mesh_facenormal[first + kept]
        model.mesh_facetexcoord[stays] = model.mesh_facetexcoord[first + kept]
        model.mesh_facenum[mesh] = len(kept)


def shrink_textures(model: mujoco.MjModel, side_px: int) -> None:
    """Flat textures whose smaller side has more than `side_px` pixels are averaged down to about that."""
    for texture in range(model.ntex):
        height, width = int(model.tex_height[texture]), int(model.tex_width[texture])
        factor = min(height, width) // side_px
        if model.tex_type[texture] != mujoco.mjtTexture.mjTEXTURE_2D or factor < 2:
            continue
        channels, first = int(model.tex_nchannel[texture]), int(model.tex_adr[texture])
        rows, columns = height // factor, width // factor
        pixels = model.tex_data[first : first + height * width * channels].reshape(height, width, channels)
        blocks = pixels[: rows * factor, : columns * factor].reshape(rows, factor, columns, factor, channels)
        small = blocks.mean(axis=(1, 3)).astype(np.uint8)
        model.tex_data[first : first + small.size] = small.ravel()
        model.tex_height[texture], model.tex_width[texture] = rows, columns
