import os

# If threads wait for each other by spinning, which is the default, a run takes twenty times as long while another
# process uses the same cores. torch reads this when it is imported, here and in the processes that the tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
