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
 * While it waits, `restore-context.json` in the control directory has variables of this container's
 * environment, as workers of Dynamo read them: {"env": {NAME: value, or null if it is not set}}. The
 * environment of a restored process is that of its source.
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
#define CONTEXT "restore-context.json"
#define CONTEXT_NEW "." CONTEXT ".new"

/* What dynamo.common.snapshot of Dynamo 1.6 takes from the file; it ignores other names. */
static const char *const context_names[] = {
    "CONTAINER_NAME", "DYN_COMPONENT", "DYN_DISCOVERY_BACKEND", "DYN_EVENT_PLANE",
    "DYN_EVENT_PLANE_HOST", "DYN_GMS_USE_V1", "DYN_HEALTH_CHECK_ENABLED", "DYN_KUBE_DISCOVERY_MODE",
    "DYN_NAMESPACE", "DYN_NAMESPACE_WORKER_SUFFIX", "DYN_PARENT_DGD_K8S_NAME",
    "DYN_PARENT_DGD_K8S_NAMESPACE", "DYN_REQUEST_PLANE", "DYN_SYSTEM_HEALTH_PATH", "DYN_SYSTEM_HOST",
    "DYN_SYSTEM_LIVE_PATH", "DYN_SYSTEM_PORT", "DYN_SYSTEM_STARTING_HEALTH_STATUS",
    "DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS", "DYN_TCP_LISTEN_BACKLOG", "DYN_TCP_RESPONSE_STREAM_HOST",
    "DYN_TCP_RESPONSE_STREAM_PORT", "DYN_TCP_RPC_HOST", "DYN_TCP_RPC_PORT", "DYN_VLLM_GMS_SHADOW_MODE",
    "ENGINE_ID", "ETCD_ENDPOINTS", "FAILOVER_LOCK_PATH", "MODEL_EXPRESS_URL", "NATS_SERVER", "POD_NAME",
    "POD_NAMESPACE", "POD_UID", "PROMETHEUS_ENDPOINT",
};

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

/* Return whether the container does its work: what was restored in it, or what was started cold.
   The kubelet shows what a failed probe has written. */
static int serves(void) {
    pid_t root = restored();
    int folder = control();
    if (folder < 0 ? root != 0 : !faccessat(folder, root ? COMPLETE : READY, F_OK, AT_SYMLINK_NOFOLLOW))
        return 1;
    fputs(root ? "the restored process does not go on yet\n"
               : "no process has been restored here yet: kubectl get snapshotrestores\n", stderr);
    return 0;
}

/* Return how many bytes the character of UTF-8 at `text` has; 0 if there is none. */
static int utf8(const unsigned char *text) {
    int size = *text < 0x80 ? 1 : *text >= 0xc2 && *text < 0xe0 ? 2 : *text >= 0xe0 && *text < 0xf0 ? 3
             : *text >= 0xf0 && *text < 0xf5 ? 4 : 0;
    for (int at = 1; at < size; at++)
        if ((text[at] & 0xc0) != 0x80)
            return 0;
    /* Overlong forms, surrogates, and what is above U+10FFFF. */
    if ((*text == 0xe0 && text[1] < 0xa0) || (*text == 0xed && text[1] > 0x9f) ||
        (*text == 0xf0 && text[1] < 0x90) || (*text == 0xf4 && text[1] > 0x8f))
        return 0;
    return size;
}

static void put_json(FILE *file, const char *value) {
    if (value == NULL) {
        fputs("null", file);
        return;
    }
    putc('"', file);
    for (const unsigned char *at = (const unsigned char *)value; *at;) {
        int size = utf8(at);
        if (size == 0) /* As Python has bytes of its environment that are no UTF-8. */
            fprintf(file, "\\udc%02x", *at++);
        else if (*at < 0x20 || *at == '"' || *at == '\\')
            fprintf(file, "\\u%04x", *at++);
        else
            while (size--)
                putc(*at++, file);
    }
    putc('"', file);
}

/* Write the variables of this container for the process that will be restored in it. */
static int write_context(int folder) {
    unlinkat(folder, CONTEXT_NEW, 0);
    int opened = openat(folder, CONTEXT_NEW, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    FILE *file = opened < 0 ? NULL : fdopen(opened, "w");
    if (file == NULL)
        return -1;
    fputs("{\"env\": {", file);
    for (size_t at = 0; at < sizeof context_names / sizeof *context_names; at++) {
        fprintf(file, "%s\"%s\": ", at ? ", " : "", context_names[at]);
        put_json(file, getenv(context_names[at]));
    }
    fputs("}}\n", file);
    int failed = ferror(file);
    if (fclose(file) || failed || renameat(folder, CONTEXT_NEW, folder, CONTEXT) < 0) {
        unlinkat(folder, CONTEXT_NEW, 0);
        return -1;
    }
    return 0;
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
    int folder = control();
    if (folder >= 0 && write_context(folder) < 0)
        fail(CONTEXT);
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
