/* Process 1 of a machine, and the pause container of a pod: it holds the namespaces, reaps what
 * loses its parent, and ends on SIGTERM. With an argument it also ends at the end of its standard
 * input, a pipe from the process that owns the cluster: the kernel closes it however that ends. */
#include <errno.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static void end(int number) {
    (void)number;
    _exit(0);
}

static void reap(int number) {
    int before = errno;
    (void)number;
    while (waitpid(-1, NULL, WNOHANG) > 0)
        continue;
    errno = before;
}

int main(int count, char **words) {
    char byte;
    (void)words;
    signal(SIGTERM, end);
    signal(SIGINT, end);
    signal(SIGCHLD, reap);
    while (count > 1) {
        ssize_t got = read(0, &byte, 1);
        if (got == 0 || (got < 0 && errno != EINTR))
            return 0;
    }
    for (;;)
        pause();
}
