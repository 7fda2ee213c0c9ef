/*
 * snapback-init: the first process of a container that waits to be restored.
 *
 *   snapback-init [-- PROGRAM ARGUMENTS]
 *                             wait for a restored process, then be for the container what it is; in
 *                             a container that is started again, become the program instead
 *   snapback-init --restored  exit with 0 once the container does its work, else 1: the startup probe
 *   snapback-init --install FILE
 *                             copy this program: an init container puts it into a volume of the pod
 *
 * It has the file `restored` beside itself, which the helper of the node puts there by a rename and
 * then sends SIGUSR1: the pid of the restored process, as this process namespace has it. From then on
 * every signal is forwarded to that process, and the container ends as it does.
 *
 * A restored process waits for the memory of its devices until the file `restore-complete` is in the
 * control directory; until then no other probe may judge it.
 *
 * The volume outlives a container: when an earlier one was restored, this one starts cold, and does
 * its work when it has written `ready-for-snapshot`. Nothing but the libc is used, which is linked
 * in: images of users may have no other file.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define FILE_NAME "restored"
#define COMPLETE "restore-complete"
#define READY "ready-for-snapshot"

/* Children that ended before the restored process was known; it may be among them. */
#define KEPT 1024
static struct ended { pid_t pid; int status; } kept[KEPT];
static unsigned int kept_count;

static int fail(const char *what) {
    fprintf(stderr, "snapback-init: %s: %s\n", what, strerror(errno));
    return 1;
}

/* Go to the folder of this program. */
static int enter_own_folder(void) {
    char path[PATH_MAX];
    ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
    if (length < 0)
        return -1;
    path[length] = '\0';
    return chdir(dirname(path));
}

static int install(const char *path) {
    char buffer[65536], partial[PATH_MAX];
    ssize_t got;
    /* By a rename, for an init container that was killed may run again. */
    snprintf(partial, sizeof partial, "%s.new", path);
    int from = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    int to = open(partial, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0755);
    if (from < 0 || to < 0)
        return fail(partial);
    while ((got = read(from, buffer, sizeof buffer)) > 0)
        if (write(to, buffer, got) != got)
            return fail(partial);
    if (got < 0 || fchmod(to, 0755) < 0 || close(to) < 0 || rename(partial, path) < 0)
        return fail(path);
    return 0;
}

/* Return the pid of the restored process, 0 when there is none yet. */
static pid_t restored(void) {
    char text[32] = "";
    int file = open(FILE_NAME, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    if (file < 0)
        return 0;
    ssize_t got = read(file, text, sizeof text - 1);
    close(file);
    long pid = got > 0 ? strtol(text, NULL, 10) : 0;
    return pid > 1 && pid <= INT_MAX ? (pid_t)pid : 0;
}

/* Return the control directory of the container; -1 where it has none. */
static int control(void) {
    const char *path = getenv("SNAPSHOT_CONTROL_DIR");
    return path == NULL ? -1 : open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
}

/* Return whether the container does its work: what was restored in it, or what was started cold. */
static int serves(void) {
    pid_t root = restored();
    int folder = control();
    if (folder < 0)
        return root != 0;
    return faccessat(folder, root ? COMPLETE : READY, F_OK, AT_SYMLINK_NOFOLLOW) == 0;
}

static void end_as(int status) {
    if (WIFSIGNALED(status)) {
        dprintf(2, "snapback-init: the restored process was ended by signal %d\n", WTERMSIG(status));
        /* The kernel gives the first process of a namespace no signal of its own. */
        _exit(128 + WTERMSIG(status));
    }
    _exit(WEXITSTATUS(status));
}

static void reap(pid_t root) {
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        if (root && pid == root)
            end_as(status);
        if (!root)
            kept[kept_count++ % KEPT] = (struct ended){pid, status};
    }
}

/* Start what the container ran before it was made to wait, from the folder `from`. */
static int start_cold(int from, char **program) {
    if (program == NULL) {
        fprintf(stderr, "snapback-init: this container was restored before and has no command to start "
                        "again; delete its pod, or give it a command\n");
        return 1;
    }
    /* Of the process that was restored before. */
    int folder = control();
    if (folder >= 0)
        unlinkat(folder, READY, 0);
    unsetenv("SNAPSHOT_RESTORE_STANDBY");
    unsetenv("DYN_SNAPSHOT_RESTORE_STANDBY");
    if (fchdir(from) < 0 || execvp(program[0], program) < 0)
        return fail(program[0]);
    return 1;
}

static pid_t adopt(void) {
    pid_t root = restored();
    for (unsigned int at = 0; root && at < KEPT; at++)
        if (kept[at].pid == root)
            end_as(kept[at].status);
    if (root)
        dprintf(1, "snapback-init: process %d was restored and goes on\n", (int)root);
    return root;
}

int main(int count, char **words) {
    if (count == 3 && !strcmp(words[1], "--install"))
        return install(words[2]);
    int from = open(".", O_PATH | O_CLOEXEC);
    if (from < 0 || enter_own_folder() < 0)
        return fail("its own folder");
    if (count == 2 && !strcmp(words[1], "--restored"))
        return serves() ? 0 : 1;
    char **program = count > 2 && !strcmp(words[1], "--") ? words + 2 : NULL;
    if (count != 1 && program == NULL) {
        fprintf(stderr, "usage: snapback-init [-- PROGRAM ARGUMENTS | --restored | --install FILE]\n");
        return 2;
    }
    if (unlink(FILE_NAME) == 0)
        return start_cold(from, program);
    if (errno != ENOENT)
        return fail(FILE_NAME);
    sigset_t all;
    sigfillset(&all);
    if (sigprocmask(SIG_BLOCK, &all, NULL) < 0)
        return fail("sigprocmask");
    int signals = signalfd(-1, &all, SFD_CLOEXEC);
    if (signals < 0)
        return fail("signalfd");
    dprintf(1, "snapback-init: waiting for a restore\n");
    for (pid_t root = 0;;) {
        struct signalfd_siginfo seen;
        if (read(signals, &seen, sizeof seen) != sizeof seen)
            continue;
        int number = (int)seen.ssi_signo;
        if (number == SIGCHLD)
            reap(root);
        else if (root)
            kill(root, number);
        else if (number == SIGUSR1)
            root = adopt();
        else if (number == SIGTERM || number == SIGINT || number == SIGQUIT)
            _exit(128 + number);
    }
}
