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

static int
append_each(PyObject *found, struct cmsghdr *extra)
{
    size_t count = (extra->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    int failed = 0;
    for (size_t n = 0; n < count; n++) {
        int fd;
        memcpy(&fd, CMSG_DATA(extra) + n * sizeof fd, sizeof fd);
        if (!MSG_CMSG_CLOEXEC)
            fcntl(fd, F_SETFD, FD_CLOEXEC);
        PyObject *number = failed ? NULL : PyLong_FromLong(fd);
        if (number == NULL || PyList_Append(found, number) < 0) {
            close(fd); /* there is no memory, or was none */
            failed = -1;
        }
        Py_XDECREF(number);
    }
    return failed;
}

static PyObject *
with_descriptors(struct msghdr *message, Py_ssize_t count)
{
    PyObject *found = PyList_New(0);
    if (found == NULL)
        return NULL;
    int failed = 0;
    for (struct cmsghdr *extra = CMSG_FIRSTHDR(message); extra != NULL;
         extra = CMSG_NXTHDR(message, extra)) {
        if (extra->cmsg_level == SOL_SOCKET && extra->cmsg_type == SCM_RIGHTS)
            failed |= append_each(found, extra);
    }
    if (!failed)
        return Py_BuildValue("nNN", count, found, PyBool_FromLong(message->msg_flags & MSG_CTRUNC));
    for (Py_ssize_t n = 0; n < PyList_GET_SIZE(found); n++)
        close((int)PyLong_AsLong(PyList_GET_ITEM(found, n)));
    Py_DECREF(found);
    return NULL;
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
    if (fd < 0 || PyObject_GetBuffer(args[1], &target, PyBUF_WRITABLE) < 0)
        return NULL;
    Extras extras;
    struct iovec into = {.iov_base = target.buf, .iov_len = target.len};
    struct msghdr message;
    ssize_t count;
    int interrupted = 0;
    do {
        memset(&message, 0, sizeof message);
        message.msg_iov = &into;
        message.msg_iovlen = 1;
        message.msg_control = extras.bytes;
        message.msg_controllen = sizeof extras.bytes;
        Py_BEGIN_ALLOW_THREADS
        count = recvmsg(fd, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
        Py_END_ALLOW_THREADS
    } while (count < 0 && errno == EINTR && !(interrupted = PyErr_CheckSignals()));
    PyBuffer_Release(&target);
    if (interrupted)
        return NULL;
    if (count < 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    if (message.msg_controllen == 0 && !(message.msg_flags & MSG_CTRUNC))
        return PyLong_FromSsize_t(count);
    return with_descriptors(&message, count);
}
