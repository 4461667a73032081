/* Bytes that came over a unix socket with descriptors beside them: mq/stream/passing.py. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "_passing.h"

#define MOST 253 /* mq.stream.passing.MOST */

#ifndef MSG_CMSG_CLOEXEC
#define MSG_CMSG_CLOEXEC 0
#endif

typedef union {
    char bytes[CMSG_SPACE(MOST * sizeof(int))];
    struct cmsghdr aligned;
} Extras;

/* All that came, into `fds`; how many. */
static int
descriptors_of(struct msghdr *message, int *fds)
{
    int count = 0;
    for (struct cmsghdr *extra = CMSG_FIRSTHDR(message); extra != NULL;
         extra = CMSG_NXTHDR(message, extra)) {
        if (extra->cmsg_level != SOL_SOCKET || extra->cmsg_type != SCM_RIGHTS)
            continue;
        const char *end = (char *)message->msg_control + message->msg_controllen;
        /* Where there was no room some systems tell of more than there is. */
        for (const char *place = (char *)CMSG_DATA(extra);
             place + sizeof *fds <= (char *)extra + extra->cmsg_len
             && place + sizeof *fds <= end && count < MOST;
             place += sizeof *fds) {
            memcpy(&fds[count], place, sizeof *fds);
            if (!MSG_CMSG_CLOEXEC)
                fcntl(fds[count], F_SETFD, FD_CLOEXEC);
            count++;
        }
    }
    return count;
}

static PyObject *
with_descriptors(struct msghdr *message, Py_ssize_t nbytes)
{
    int fds[MOST], count = descriptors_of(message, fds);
    PyObject *found = PyList_New(count), *result = NULL;
    for (int n = 0; found != NULL && n < count; n++) {
        PyObject *number = PyLong_FromLong(fds[n]);
        if (number == NULL)
            Py_CLEAR(found);
        else
            PyList_SET_ITEM(found, n, number);
    }
    if (found != NULL) {
        PyObject *truncated = message->msg_flags & MSG_CTRUNC ? Py_True : Py_False;
        result = Py_BuildValue("nOO", nbytes, found, truncated);
        Py_DECREF(found);
    }
    for (int n = 0; result == NULL && n < count; n++)
        close(fds[n]); /* there is no memory to tell anybody of them */
    return result;
}

PyObject *
receive_passing(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    Py_buffer target;
    if (nargs != 2) {
        PyErr_SetString(PyExc_TypeError, "receive_passing(sock, target)");
        return NULL;
    }
    int fd = PyObject_AsFileDescriptor(args[0]);
    if (fd < 0 && PyErr_ExceptionMatches(PyExc_ValueError)) { /* it is closed */
        PyErr_Clear();
        errno = EBADF;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    if (fd < 0 || PyObject_GetBuffer(args[1], &target, PyBUF_WRITABLE) < 0)
        return NULL;
    Extras extras;
    struct iovec into = {.iov_base = target.buf, .iov_len = target.len};
    struct msghdr message;
    ssize_t count;
    int interrupted = 0, error;
    do {
        memset(&message, 0, sizeof message);
        message.msg_iov = &into;
        message.msg_iovlen = 1;
        message.msg_control = extras.bytes;
        message.msg_controllen = sizeof extras.bytes;
        Py_BEGIN_ALLOW_THREADS
        count = recvmsg(fd, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
        error = errno;
        Py_END_ALLOW_THREADS
    } while (count < 0 && error == EINTR && !(interrupted = PyErr_CheckSignals()));
    PyBuffer_Release(&target);
    if (interrupted)
        return NULL;
    if (count < 0) {
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    if (message.msg_controllen == 0 && !(message.msg_flags & MSG_CTRUNC))
        return PyLong_FromSsize_t(count);
    return with_descriptors(&message, count);
}
