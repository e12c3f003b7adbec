import os

# By default, OpenMP's threads spin while they wait for each other. On two cores that another process uses too, a run
# can take twenty times as long. The setting is read when torch is imported, here and in all processes that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
