"""Pipeline parallelism: the layers are cut over the ranks of ``mesh.pp``. Begin with ``runtime``."""
