"""ReFrame's check of an installed hpctk: a short training by two methods, what it learned and what it sent.

reframe -C packaging/reframe/settings.py -c packaging/reframe/hpctk_check.py -r
"""

import reframe as rfm
import reframe.utility.sanity as sn


@rfm.simple_test
class HpctkTrains(rfm.RunOnlyRegressionTest):
    """Train digits on 4 ranks."""

    descr = "hpctk trains on the ranks of the system's launcher"
    method = parameter(["mean", "saef"])
    valid_systems = ["*"]
    valid_prog_environs = ["*"]
    num_tasks = 4
    num_tasks_per_node = 2
    time_limit = "10m"
    executable = "python"

    @run_before("run")
    def set_command(self):
        """Say what is run: `python -m mpi4py` lets an error of one rank end all of them."""
        self.executable_opts = ["-m mpi4py -m hpctk train digits --epochs 5 --seed 1", f"--method {self.method}"]
        self.env_vars = {"OMP_NUM_THREADS": "1", "HPCTK_TIMEOUT_S": "120"}

    @sanity_function
    def learned(self):
        """Return whether the table at the end has this method, with an accuracy above 90 %."""
        return sn.assert_gt(self._column(r"(?P<found>[\d.]+)%"), 90.0)

    @performance_function("%")
    def accuracy(self):
        """Return the accuracy on held-out images."""
        return self._column(r"(?P<found>[\d.]+)%")

    @performance_function("MB")
    def sent_per_rank(self):
        """Return what a rank sent: the same on every system, so a change is a change of the software."""
        return self._column(r".*?(?P<found>[\d.]+) MB")

    def _column(self, pattern):
        return sn.extractsingle(rf"^{self.method}\s+{pattern}", self.stdout, "found", float)
